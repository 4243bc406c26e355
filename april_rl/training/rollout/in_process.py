"""Engines in this process, run one after another: for a run in one process, TRL and benchmarks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from april_rl.training.rollout.requests import Request, Requests
from april_rl.training.rollout.ticks import Completions, Tick
from april_rl.types import Completion


class SingleEngine(Protocol):
    """Protocol of one engine: `VllmEngine`, a simulated engine, or a fake of a test."""

    def advance(self, submit: Sequence[Request], *, slots: int, max_steps: int) -> Tick:
        """Queue `submit` and compute at most `max_steps` steps with at most `slots` requests
        together; return what finished. Every request is returned once, here or by `abort`.
        """

    def abort(self) -> Completions:
        """Return one completion for every request not yet returned, and empty the engine. Some may
        have finished in a step that was under way.
        """


class SerialEngines:
    """`ports.Engines` over engines that compute when `wait` is called."""

    def __init__(self, engines: Sequence[SingleEngine], *, computes_launched: bool = False) -> None:
        """Use `engines[i]` as engine i of the protocol. With `computes_launched`, an abort
        computes the launched ticks first, as engines in other processes do.
        """
        self._engines, self._computes_launched = engines, computes_launched
        self._launched: deque[tuple[int, Requests, int, int]] = deque()

    @property
    def num_engines(self) -> int:
        return len(self._engines)

    def launch(self, engine: int, submit: Requests, *, slots: int, max_steps: int) -> None:
        """Queue a tick; `wait` computes it."""
        self._launched.append((engine, submit, slots, max_steps))

    def wait(self, timeout_s: float, *, gather_s: float = 0.0) -> list[tuple[int, Tick]]:  # noqa: ARG002 (nothing to wait for)
        """Compute the oldest launched tick and return it."""
        engine, submit, slots, max_steps = self._launched.popleft()
        requests = submit.each()
        return [(engine, self._engines[engine].advance(requests, slots=slots, max_steps=max_steps))]

    def abort(self, timeout_s: float) -> tuple[list[Completion], list[int]]:  # noqa: ARG002
        """Return a completion for each request of the engines and of ticks not yet computed."""
        completions: list[Completion] = []
        for engine, submit, slots, max_steps in self._launched:
            steps = max_steps if self._computes_launched else 0
            tick = self._engines[engine].advance(submit.each(), slots=slots, max_steps=steps)
            completions += tick.finished
        self._launched.clear()
        for single in self._engines:
            completions += single.abort()
        return completions, []
