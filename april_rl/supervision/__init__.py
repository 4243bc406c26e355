"""Supervision: notices that a worker died, hangs or has no memory left, and says where it stood."""
