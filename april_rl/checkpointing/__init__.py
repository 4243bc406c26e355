"""Checkpoints of a whole run: written whole or not at all, checked before they are read."""
