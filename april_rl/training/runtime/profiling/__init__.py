"""Traces of whole steps: the controller's phases and a worker's calls."""
