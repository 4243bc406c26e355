"""How a Hugging Face model becomes an FSDP2 policy, and a Hugging Face folder again."""
