"""Protocols for the parts that the collector needs: engines, rewards and environments, prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from april_rl.training.rollout.requests import Requests
from april_rl.training.rollout.ticks import Tick
from april_rl.types import Completion, Prompt, Reply, Sample, Score


class Engines(Protocol):
    """Every engine of the run, driven in ticks, which run in the order of their launch."""

    @property
    def num_engines(self) -> int:
        """Return how many engines there are, numbered 0 … num_engines - 1."""

    def launch(self, engine: int, submit: Requests, *, slots: int, max_steps: int) -> None:
        """Start a tick, or queue it behind the one that runs; return at once.

        The engine queues the requests of `submit`, computes at most `slots` requests together,
        starts queued ones in order as slots become free, and returns after `max_steps` engine steps
        or when it has nothing to do.
        """

    def wait(self, timeout_s: float, *, gather_s: float = 0.0) -> list[tuple[int, Tick]]:
        """Return the ticks that have ended since the last call or end within `gather_s`, at least
        one. Raise EngineStalledError when none ends within `timeout_s`.
        """

    def abort(self, timeout_s: float) -> tuple[Sequence[Completion], list[int]]:
        """Stop everything; return a completion for every request not yet reported by `wait`, and
        the stalled engines.

        Finished requests of ticks under way have a finish_reason, unfinished ones have None, and
        requests that never had a slot have no tokens. Takes at most `timeout_s`: an engine that has
        not returned by then is in the second list and gives no completions. A later `wait` never
        reports what was launched before.
        """


class Outside(Protocol):
    """Rewards and environments, which compute elsewhere while generation continues."""

    def submit(self, sample: Sample, *, group_size: int) -> None:
        """Score a finished sample of a group of `group_size`; return at once. Once all samples of
        its group are submitted, every sample gets a score, which may say that its reward failed.
        """

    def act(self, sample: Sample) -> None:
        """Let the environment of an unfinished sample reply to its last turn, or begin if there is
        none; return at once. It gets one reply, which may say that the environment has failed.
        """

    def collect(
        self, timeout_s: float | None, look: Callable[[], None] = ...
    ) -> Sequence[Score | Reply]:
        """Return the scores and replies that have become known, each kind in the order in which
        they were asked for.

        With `timeout_s` 0 return what is there now; with a positive one wait that long for at least
        one; with None wait for all, except scores of samples that can only be scored together with
        siblings that are not submitted yet. Scores of such a group become known together. While it
        waits, `look` is called at least every second; what it raises loses no reply.
        """


class PromptSource(Protocol):
    """An endless stream of prompts with increasing ids."""

    def take(self) -> Prompt:
        """Return the next prompt."""
