"""The methods that a worker calls on its engine. Another engine needs the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from april_rl.training.rollout.in_process import SingleEngine

if TYPE_CHECKING:
    from torch import Tensor


class Engine(SingleEngine, Protocol):
    """One rank of an inference engine, in the worker's process; `VllmEngine` is one.

    Ranks of one engine make the same calls with the same arguments and return the same results.
    """

    @property
    def policy_version(self) -> int:
        """Return the version of the weights it samples with; 0 before the first `load_weights`."""

    @property
    def keeps_weights(self) -> bool:
        """Return whether the weights stay in memory during `sleep`."""

    @property
    def kv_cache_tokens(self) -> int:
        """Return how many tokens fit the KV cache."""

    def sleep(self) -> None:
        """Free memory for the learner, if it can; only while the engine is empty."""

    def wake_weights(self) -> None:
        """Allocate the memory for weights again; `load_weights` fills it."""

    def wake_kv_cache(self) -> None:
        """Make room for the KV cache again."""

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], *, policy_version: int) -> None:
        """Replace the weights; tensors come whole, one at a time, under Hugging Face's names."""

    def load_adapter(self, folder: Path, *, policy_version: int) -> None:
        """Replace the adapter by the one in `folder`, in peft's format."""

    def close(self) -> None:
        """Free all memory and leave the process groups."""
