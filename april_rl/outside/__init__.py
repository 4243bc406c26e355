"""Supervised processes that answer from outside the controller: rewards and environments."""
