"""The workers' engines as the collector sees them: ticks in flight, their results, stalls."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import ray

from april_rl.errors import RunError
from april_rl.training.rollout.requests import Requests
from april_rl.training.rollout.ticks import Completions, Tick
from april_rl.training.runtime.lockstep import Fingerprint, check_lockstep
from april_rl.training.runtime.parked_tokens import ParkedTokens
from april_rl.types import Completion

if TYPE_CHECKING:
    from april_rl.training.runtime.workers import RayWorkers

# Longest duration of `abort` after workers have failed: the others return what they have.
_AFTER_FAILURE_S = 3.0
_REPORT_FROM_S = 10.0  # Ctrl-C leaves less time than this, and then no one waits for a report

_Results = Mapping["ray.ObjectRef[Any]", Any]  # results of calls that have ended


class StepTimer:
    """Clock of the time in which no engine made a step while requests were in flight."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_step_at = clock()
        self.num_requests = 0  # in flight

    def launch(self, num_requests: int) -> None:
        """Add requests that are sent to an engine."""
        if not self.num_requests:
            self._last_step_at = self._clock()
        self.num_requests += num_requests

    def record(self, tick: Tick) -> None:
        """Note the steps of a tick and remove the requests that it finished."""
        if tick.engine_steps:
            self._last_step_at = self._clock()
        self.num_requests -= len(tick.finished)

    def clear(self) -> None:
        self.num_requests = 0

    @property
    def no_step_s(self) -> float:
        """Return the time since the last step; 0 when no request is in flight."""
        return self._clock() - self._last_step_at if self.num_requests else 0.0


class _Call(NamedTuple):
    """The same call to every rank of one engine."""

    first: ray.ObjectRef[Any]  # returns a Tick, or the completions of an abort
    others: list[ray.ObjectRef[Fingerprint]]

    @property
    def refs(self) -> list[ray.ObjectRef[Any]]:
        return [self.first, *self.others]


class RayEngines:
    """`rollout.ports.Engines` over the workers; an engine is a group of ranks in lockstep."""

    def __init__(self, workers: RayWorkers, *, deterministic: bool) -> None:
        """With `deterministic`, `wait` waits for a tick of every engine that has one."""
        self._workers, self._watchdog = workers, workers.watchdog
        self._engines = workers.engine_actors
        self._deterministic = deterministic
        self._ticks: list[deque[_Call]] = [deque() for _ in self._engines]
        # Results of the oldest tick of every engine: the awaited ones with their engine, and the
        # ones that arrived before other ranks returned. They are kept up to date at each tick, so
        # that the cost does not grow with the number of engines.
        self._awaited: dict[ray.ObjectRef[Any], int] = {}
        self._results: dict[ray.ObjectRef[Any], Any] = {}
        self._step_timer = StepTimer()
        self._parked = [ParkedTokens() for _ in self._engines]

    @property
    def num_engines(self) -> int:
        """Return how many engines sample independently of each other."""
        return len(self._engines)

    def launch(self, engine: int, submit: Requests, *, slots: int, max_steps: int) -> None:
        """Queue a tick behind the one that runs."""
        self._step_timer.launch(len(submit.indices))
        submit = self._parked[engine].omit(submit)
        first, *others = self._engines[engine]
        options = {"slots": slots, "max_steps": max_steps}
        call = first.advance.remote(submit, **options)
        follow = [rank.follow_advance.remote(submit, **options) for rank in others]
        self._ticks[engine].append(_Call(call, follow))
        if len(self._ticks[engine]) == 1:
            self._await_oldest(engine)

    def wait(self, timeout_s: float, *, gather_s: float = 0.0) -> list[tuple[int, Tick]]:
        """Return the oldest tick of every engine whose oldest tick has ended after `gather_s`; wait
        for at least one.

        Raise the errors of `Watchdog.results`; EngineStalledError when ticks return but no engine
        has made a step for `timeout_s`; and RunError when the ranks of an engine differ, or an
        engine samples with other weights than the ones that were synced last.
        """
        wanted = sum(map(bool, self._ticks)) if self._deterministic else 1
        if not self._deterministic:
            time.sleep(gather_s)
        complete: list[int] = []
        while len(complete) < wanted:
            ended = self._watchdog.wait(list(self._awaited), reports_beats=True)
            self._results |= ended
            engines = {self._awaited.pop(ref) for ref in ended}
            complete += [engine for engine in engines if self._has_oldest(engine)]
        ticks = []
        for engine in sorted(complete):
            results = {ref: self._results.pop(ref) for ref in self._ticks[engine][0].refs}
            ticks.append((engine, self._take_tick(engine, results)))
            if self._ticks[engine]:
                self._await_oldest(engine)
        if self._step_timer.no_step_s >= timeout_s:
            self._watchdog.raise_stalled(
                f"no engine has made a step for runtime.stall_timeout_s = {timeout_s:g} s, though "
                f"ticks return; requests in flight: {self._step_timer.num_requests}"
            )
        return ticks

    def abort(self, timeout_s: float) -> tuple[list[Completion], list[int]]:
        """Return the completions of ticks and of the abort, and the stalled engines."""
        if self._watchdog.has_failed:
            timeout_s = min(timeout_s, _AFTER_FAILURE_S)
        deadline = time.monotonic() + timeout_s
        self._awaited.clear()
        self._results.clear()
        calls = [
            _Call(first.abort.remote(), [rank.follow_abort.remote() for rank in others])
            for first, *others in self._engines
        ]
        completions: list[Completion] = []
        stalled: list[int] = []
        for engine, (ticks, call) in enumerate(zip(self._ticks, calls, strict=True)):
            refs = [ref for each in (*ticks, call) for ref in each.refs]
            found = self._watchdog.results_within(refs, max(0.0, deadline - time.monotonic()))
            if found is None:
                ticks.clear()
                self._parked[engine] = ParkedTokens()
                stalled.append(engine)
                continue
            results = dict(zip(refs, found, strict=True))
            while ticks:
                completions += self._take_tick(engine, results).finished
            given_back = self._check(engine, call, results[call.first], results=results)
            self._parked[engine].park(given_back)
            completions += given_back
        if stalled and timeout_s >= _REPORT_FROM_S:
            self._watchdog.write_report(
                f"engine {stalled[0]} did not return its samples within {timeout_s:g} s"
            )
        self._step_timer.clear()
        return completions, stalled

    def _await_oldest(self, engine: int) -> None:
        for ref in self._ticks[engine][0].refs:
            self._awaited[ref] = engine

    def _has_oldest(self, engine: int) -> bool:
        return all(ref in self._results for ref in self._ticks[engine][0].refs)

    def _take_tick(self, engine: int, results: _Results) -> Tick:
        call = self._ticks[engine].popleft()
        tick: Tick = results[call.first]
        self._step_timer.record(tick)
        self._check(engine, call, tick.finished, results=results)
        return tick

    def _check(
        self, engine: int, call: _Call, completions: Completions, *, results: _Results
    ) -> Completions:
        """Return `completions` if all ranks sampled the same, and with the current weights."""
        check_lockstep(
            completions,
            [results[ref] for ref in call.others],
            first_rank=engine * (1 + len(call.others)),
        )
        expected = self._workers.policy_version
        for version in {completion.policy_version for completion in completions}:
            if version != expected:
                raise RunError(
                    f"engine {engine} samples with policy version {version}, the controller is at "
                    f"{expected}: the last weight sync did not reach the engine"
                )
        return completions
