"""The workers' engines as the collector sees them: ticks in flight, results, stalls."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import ray

from april_rl.rollout.ports import EngineStalledError
from april_rl.runtime.calls import results
from april_rl.runtime.workers import Workers
from april_rl.types import Completion, Request, Tick


class RayEngines:
    """`rollout.ports.Engines` over the workers' engines."""

    def __init__(self, workers: Workers, *, deterministic: bool) -> None:
        """`deterministic`: `wait` waits for a tick of every engine that has one."""
        self._actors = workers.actors
        self._deterministic = deterministic
        self._ticks: list[deque[ray.ObjectRef[Tick]]] = [deque() for _ in self._actors]

    @property
    def num_engines(self) -> int:
        """One a worker."""
        return len(self._actors)

    def launch(self, engine: int, submit: Sequence[Request], *, slots: int, max_steps: int) -> None:
        """Queue a tick behind the one that runs."""
        call = self._actors[engine].advance.remote(submit, slots=slots, max_steps=max_steps)
        self._ticks[engine].append(call)

    def wait(self, timeout_s: float) -> list[tuple[int, Tick]]:
        """The oldest tick of every engine whose oldest tick has ended; waits for at least one.

        Raises EngineStalledError after `timeout_s`, WorkerDiedError or the worker's own error when
        one failed.
        """
        heads = {ticks[0]: engine for engine, ticks in enumerate(self._ticks) if ticks}
        wanted = len(heads) if self._deterministic else 1
        ended, waiting = ray.wait(list(heads), num_returns=wanted, timeout=timeout_s)
        if len(ended) < wanted:
            raise EngineStalledError(
                f"engine {heads[waiting[0]]} has not answered for {timeout_s:g} s (a tick of "
                "rollout.tick_steps engine steps); its worker hangs"
            )
        if waiting:
            ended += ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]
        engines = sorted(heads[ref] for ref in ended)
        return list(zip(engines, results([self._ticks[e].popleft() for e in engines]), strict=True))

    def abort(self, timeout_s: float) -> tuple[list[Completion], list[int]]:
        """What ticks under way still bring, then what each engine gives back; stalled engines give
        nothing.
        """
        deadline = time.monotonic() + timeout_s
        calls = [actor.abort.remote() for actor in self._actors]
        completions: list[Completion] = []
        stalled: list[int] = []
        for engine, (ticks, call) in enumerate(zip(self._ticks, calls, strict=True)):
            refs = [*ticks, call]
            left_s = max(0.0, deadline - time.monotonic())
            ended, _ = ray.wait(refs, num_returns=len(refs), timeout=left_s)
            ticks.clear()
            if len(ended) < len(refs):
                stalled.append(engine)
                continue
            *reports, rest = results(refs)
            completions += [c for tick in reports for c in tick.finished]
            completions += rest
        return completions, stalled
