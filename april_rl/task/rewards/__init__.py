"""Reward functions and the processes that run them: built-in ones, and the user's."""
