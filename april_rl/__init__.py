"""Reinforcement learning of language models with Active Partial Rollouts, on FSDP2 and vLLM.

From Python: `from april_rl.api import train, evaluate`; as a command: `python -m april_rl.train`.
"""

__version__ = "0.1.0"
