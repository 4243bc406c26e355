"""`rollout.over_sampling_factor=auto`: measure engine cost and response lengths, and choose α."""
