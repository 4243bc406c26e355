"""What fits the memory of GPUs and hosts, before anything is loaded."""
