"""Processes that answer from outside the controller, supervised: rewards and environments."""
