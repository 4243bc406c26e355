"""Trains a recorded step again, with the same settings or with others."""
