"""Decides whether two written answers are equal: clean both, find their kinds, compare by kind."""
