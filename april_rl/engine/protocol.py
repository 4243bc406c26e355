"""What a worker needs of an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from april_rl.errors import RunError
from april_rl.ticks import Completions, Tick
from april_rl.types import Request

if TYPE_CHECKING:
    import torch


class EngineStartError(RunError):
    """The engine could not be built on this device with these settings; the message names them."""


class Engine(Protocol):
    """One engine in one worker process; called by one thread.

    Every request that was submitted comes back exactly once: finished from `advance`, or as far as
    it got from `abort`.
    """

    @property
    def policy_version(self) -> int:
        """Version of the weights the engine samples with; 0 before the first `load_weights`."""

    def advance(self, submit: Sequence[Request], *, slots: int, max_steps: int) -> Tick:
        """Queue `submit` and compute at most `max_steps` engine steps; says what finished.

        At most `slots` requests are computed together; queued ones take the slots that fall free
        between engine steps, in the order of their submission. Ends early when nothing runs and
        nothing waits. Raises ValueError, and queues nothing, when a request cannot fit the engine.
        """

    def abort(self) -> Completions:
        """One completion for every request `advance` has not returned, with `finish_reason` None.

        Those that were running come first, with the tokens they have; those that never had a slot
        follow with no tokens. Each part is in the order of submission. The engine is empty
        afterwards, but may hold the state of what it gave back: a request that goes on with a
        sample where it stopped then needs no prefill (`Completion.context_version` tells).
        """

    def load_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], *, policy_version: int
    ) -> None:
        """Sample with `weights` (Hugging Face names, every weight of the model) from now on.

        Only while the engine is empty. Nothing computed with the old weights is used again, but
        for the state of the very samples that were aborted.
        """

    def sleep(self) -> None:
        """Give up weights and KV cache on an accelerator; only while the engine is empty."""

    def wake_weights(self) -> None:
        """Take memory for the weights again; their values are undefined until `load_weights`."""

    def wake_kv_cache(self) -> None:
        """Take memory for the KV cache again, after `load_weights`."""
