"""What a run will cost: memory, seconds of a step by part, hours and money, before it starts."""
