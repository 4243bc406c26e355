"""The tiny task: sums with worked solutions, a character tokenizer and a warm-started Qwen3."""
