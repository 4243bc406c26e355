"""Environments: user code that replies to the turns of a sample, in processes of its own."""
