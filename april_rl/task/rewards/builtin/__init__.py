"""Built-in reward functions; reward processes import the one that a run names."""
