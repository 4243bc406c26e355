"""Reinforcement learning of language models with Active Partial Rollouts, on FSDP2 and vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from april_rl.python import TrainedRun, evaluate, train

__version__ = "0.1.0"
__all__ = ["TrainedRun", "evaluate", "train"]


def __getattr__(name: str) -> object:
    """Import what is used from Python only then: commands need none of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from april_rl import python

    return vars(python)[name]
