"""The workers' engines as the collector sees them: ticks in flight, results, stalls."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ray

from april_rl.errors import RunError
from april_rl.rollout.requests import Requests
from april_rl.runtime.in_flight import RequestsInFlight
from april_rl.runtime.lockstep import Fingerprint, check_lockstep
from april_rl.runtime.workers import Workers
from april_rl.ticks import Completions, Tick
from april_rl.types import Completion

# Once workers have failed, for what the others still have.
_AFTER_FAILURE_S = 3.0
_REPORT_FROM_S = 10.0  # an abort that may take less is that of a person who waits

_Found = Mapping["ray.ObjectRef[Any]", Any]  # the results of calls that have ended


class WeightVersionError(RunError):
    """An engine samples with other weights than the controller believes."""


class _Call(NamedTuple):
    """What the ranks of one engine were asked, each the same."""

    first: ray.ObjectRef[Any]  # a Tick, or the completions of an abort
    others: list[ray.ObjectRef[Fingerprint]]

    @property
    def refs(self) -> list[ray.ObjectRef[Any]]:
        """By rank."""
        return [self.first, *self.others]


class RayEngines:
    """`rollout.ports.Engines` over the workers' engines: a group of ranks in lockstep each."""

    def __init__(self, workers: Workers, *, deterministic: bool) -> None:
        """`deterministic`: `wait` waits for a tick of every engine that has one."""
        self._workers, self._watchdog = workers, workers.watchdog
        self._engines = workers.engines
        self._deterministic = deterministic
        self._ticks: list[deque[_Call]] = [deque() for _ in self._engines]
        # Of the oldest tick of every engine: what has not come yet, with the engine, and what has
        # of those not whole. Kept up, for a tick must not cost a look at hundreds of engines.
        self._awaited: dict[ray.ObjectRef[Any], int] = {}
        self._found: dict[ray.ObjectRef[Any], Any] = {}
        self._in_flight = RequestsInFlight()
        self._watchdog.include_oldest_request(self._in_flight.describe_oldest)

    @property
    def num_engines(self) -> int:
        """How many sample independently of each other."""
        return len(self._engines)

    def launch(self, engine: int, submit: Requests, *, slots: int, max_steps: int) -> None:
        """Queue a tick behind the one that runs."""
        self._in_flight.launch(engine, submit)
        first, *others = self._engines[engine]
        what = {"slots": slots, "max_steps": max_steps}
        call = first.advance.remote(submit, **what)
        follow = [rank.follow_advance.remote(submit, **what) for rank in others]
        self._ticks[engine].append(_Call(call, follow))
        if len(self._ticks[engine]) == 1:
            self._await_oldest(engine)

    def wait(self, timeout_s: float, *, gather_s: float = 0.0) -> list[tuple[int, Tick]]:
        """The oldest tick of every engine whose oldest tick has ended after `gather_s`; waits for
        at least one.

        Raises what `Watchdog.results` does; EngineStalledError also when no engine has finished an
        engine step for `timeout_s` though ticks come back; LockstepError when the ranks of an
        engine differ, and WeightVersionError when it samples with other weights than it was given
        last.
        """
        wanted = sum(map(bool, self._ticks)) if self._deterministic else 1
        if not self._deterministic:
            time.sleep(gather_s)
        whole: list[int] = []
        while len(whole) < wanted:
            ended = self._watchdog.wait(list(self._awaited), reports_beats=True)
            self._found |= ended
            engines = {self._awaited.pop(ref) for ref in ended}
            whole += [engine for engine in engines if self._is_whole(engine)]
        ticks = []
        for engine in sorted(whole):
            found = {ref: self._found.pop(ref) for ref in self._ticks[engine][0].refs}
            ticks.append((engine, self._tick(engine, found)))
            if self._ticks[engine]:
                self._await_oldest(engine)
        if self._in_flight.no_step_s >= timeout_s:
            self._watchdog.raise_stalled(
                f"no engine has made an engine step for {timeout_s:g} s "
                "(runtime.stall_timeout_s), though samples are in flight and ticks come back"
            )
        return ticks

    def abort(self, timeout_s: float) -> tuple[list[Completion], list[int]]:
        """What ticks under way still bring, then what each engine gives back; stalled engines give
        nothing. Once workers have failed, engines have little time for it.
        """
        if self._watchdog.has_failed:
            timeout_s = min(timeout_s, _AFTER_FAILURE_S)
        deadline = time.monotonic() + timeout_s
        self._awaited.clear()
        self._found.clear()
        calls = [self._launch_abort(ranks) for ranks in self._engines]
        given_back: list[Completion] = []
        stalled: list[int] = []
        for engine, (ticks, call) in enumerate(zip(self._ticks, calls, strict=True)):
            refs = [ref for each in (*ticks, call) for ref in each.refs]
            results = self._watchdog.results_within(refs, max(0.0, deadline - time.monotonic()))
            if results is None:
                ticks.clear()
                stalled.append(engine)
                continue
            found = dict(zip(refs, results, strict=True))
            while ticks:
                given_back += self._tick(engine, found).finished
            given_back += self._checked(engine, call, found[call.first], found=found)
        if stalled and timeout_s >= _REPORT_FROM_S:
            self._watchdog.write_report(f"engine {stalled[0]} does not give its samples back")
        self._in_flight.clear()
        return given_back, stalled

    def _await_oldest(self, engine: int) -> None:
        for ref in self._ticks[engine][0].refs:
            self._awaited[ref] = engine

    def _is_whole(self, engine: int) -> bool:
        """Whether every rank has answered the oldest tick."""
        return all(ref in self._found for ref in self._ticks[engine][0].refs)

    def _launch_abort(self, ranks: Sequence[Any]) -> _Call:
        first, *others = ranks
        return _Call(first.abort.remote(), [rank.follow_abort.remote() for rank in others])

    def _tick(self, engine: int, found: _Found) -> Tick:
        """The oldest tick of an engine, whose results are in `found`; it is off the list then."""
        call = self._ticks[engine].popleft()
        tick: Tick = found[call.first]
        self._in_flight.record(tick)
        self._checked(engine, call, tick.finished, found=found)
        return tick

    def _checked(
        self, engine: int, call: _Call, completions: Completions, *, found: _Found
    ) -> Completions:
        """The `completions` of a call, when all ranks sampled them, and with the weights of now."""
        check_lockstep(
            completions,
            [found[ref] for ref in call.others],
            first_rank=engine * (1 + len(call.others)),
        )
        expected = self._workers.policy_version
        for version in {completion.policy_version for completion in completions}:
            if version != expected:
                raise WeightVersionError(
                    f"engine {engine} samples with policy version {version}, the controller is at "
                    f"{expected}: the last weight sync did not reach the engine"
                )
        return completions
