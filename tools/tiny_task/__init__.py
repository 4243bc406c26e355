"""What `tools/tiny_policy.py` makes: sums with worked solutions, a tokenizer, a policy."""
