"""Built-in reward functions. One is imported in the reward processes, when a run names it."""
