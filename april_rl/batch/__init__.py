"""Packing and balancing: pure."""
