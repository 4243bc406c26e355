"""Packing and balancing of training batches; pure functions."""
