"""Turns a Hugging Face model into an FSDP2 policy, and that into a Hugging Face folder again."""
