"""The run: what it keeps, watches and shows."""
