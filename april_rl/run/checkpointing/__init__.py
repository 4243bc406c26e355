"""Checkpoints of a whole run: written completely or not at all, and checked before use."""
