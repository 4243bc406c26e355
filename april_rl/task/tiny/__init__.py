"""The tiny task: a Qwen3 of half a million parameters, and sums."""
