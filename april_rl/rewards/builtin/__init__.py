"""Reward functions that need more than text: a sandbox, a judge, a reward model. One is imported
only when a run names it."""
