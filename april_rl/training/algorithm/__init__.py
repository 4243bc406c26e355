"""Advantages, losses, off-policy weights: pure functions."""
