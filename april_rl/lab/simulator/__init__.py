"""Simulate a run: the production collector on simulated engines and a virtual clock."""
