"""The kills of `tools/kill_anywhere.py`, and the checks afterwards."""
