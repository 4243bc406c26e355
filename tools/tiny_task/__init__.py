"""The parts of `tools/tiny_policy.py`: sums with worked solutions, a tokenizer, a policy."""
