"""`rollout.over_sampling_factor=auto`: engine cost, response lengths, and which α pays."""
