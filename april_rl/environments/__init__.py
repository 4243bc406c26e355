"""Environments: user code that answers the turns of a sample, in processes of its own."""
