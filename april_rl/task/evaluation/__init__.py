"""avg@k, pass@k and maj@k on held-out sets."""
