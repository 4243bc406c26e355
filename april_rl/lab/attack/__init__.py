"""Responses that solve nothing, and what a reward pays for them."""
