"""Reinforcement learning of language models with Active Partial Rollouts, on FSDP2 and vLLM."""
