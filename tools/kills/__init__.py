"""What `tools/kill_anywhere.py` does to a run, and what must hold afterwards."""
