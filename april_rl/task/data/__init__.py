"""Turn data sets into an endless, shuffled, resumable stream of prompts."""
