"""A recipe tried out on this machine before GPUs are rented for it."""
