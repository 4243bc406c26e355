"""Data sets to an endless, shuffled, resumable stream of prompts."""
