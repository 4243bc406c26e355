"""What the collector needs of the world, as protocols: engines, a scorer, prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from april_rl.errors import RunError
from april_rl.rollout.requests import Requests
from april_rl.ticks import Tick
from april_rl.types import Completion, Prompt, Sample, Score


class EngineStalledError(RunError):
    """An engine did not answer within the deadline; its worker has to be replaced."""


class Engines(Protocol):
    """Every engine of the run, driven in ticks. Ticks of one engine run in the order of their
    launch.
    """

    @property
    def num_engines(self) -> int:
        """How many there are; engines are named 0 … num_engines - 1."""

    def launch(self, engine: int, submit: Requests, *, slots: int, max_steps: int) -> None:
        """Start a tick, or queue it behind the one that runs; returns at once.

        The engine queues the requests of `submit`, computes at most `slots` requests together,
        taking queued ones in order as slots fall free, and returns after `max_steps` engine steps
        or when it has nothing to do.
        """

    def wait(self, timeout_s: float, *, gather_s: float = 0.0) -> list[tuple[int, Tick]]:
        """The ticks that have ended since the last call, at least one, in the order of their launch
        per engine; those too that end within `gather_s`, so that one call takes in several.

        Raises EngineStalledError when none ends within `timeout_s`.
        """

    def abort(self, timeout_s: float) -> tuple[Sequence[Completion], list[int]]:
        """Stop everything: one completion for every request not yet reported by `wait`, and the
        stalled engines.

        Finished requests of ticks that were still under way come with their finish_reason,
        unfinished ones with None, requests that never had a slot with no tokens. Ends within
        `timeout_s`; an engine that did not answer by then is in the second list and gives no
        completions. What was launched before is never reported by a later `wait`.
        """


class Scorer(Protocol):
    """Rewards, computed elsewhere while generation goes on."""

    def submit(self, sample: Sample, *, group_size: int) -> None:
        """Score a finished sample of a group of `group_size`; returns at once. Every sample is
        given a score once all samples of its group are submitted, be it that there is none.
        """

    def collect(self, timeout_s: float | None) -> list[Score]:
        """The scores that have become known, in the order of submission as far as they go.

        `timeout_s` 0: what is there now; positive: wait so long for at least one; None: wait for
        all submitted, but for those that can only be scored together with siblings that are not
        submitted yet. Those of one group then become known together.
        """


class PromptSource(Protocol):
    """An endless stream of prompts with increasing ids."""

    def take(self) -> Prompt:
        """The next prompt."""
