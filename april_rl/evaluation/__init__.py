"""avg@k and pass@k on held-out sets."""
