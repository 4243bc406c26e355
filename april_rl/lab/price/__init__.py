"""Memory, time and price of a run on GPUs, computed before it starts."""
