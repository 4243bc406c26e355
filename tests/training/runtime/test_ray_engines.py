"""Which ticks `RayEngines` waits for, with calls that end when the test says so."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from light_samples import make_tick

from april_rl.training.rollout.requests import Requests
from april_rl.training.rollout.ticks import Completions
from april_rl.training.runtime.engines import RayEngines
from april_rl.training.runtime.lockstep import fingerprint

TICK = make_tick()


class Method:
    """A worker's method: each call gets its own reference, which the test can find."""

    def __init__(self, result: Any) -> None:
        self._result, self.calls = result, deque[Call]()

    def remote(self, *_: Any, **__: Any) -> Call:
        self.calls.append(Call(self._result))
        return self.calls[-1]


class Call:
    def __init__(self, result: Any) -> None:
        self.result = result


class Rank:
    def __init__(self) -> None:
        self.advance, self.follow_advance = Method(TICK), Method(fingerprint(()))
        self.abort, self.follow_abort = Method(Completions()), Method(fingerprint(()))


class Script:
    """A watchdog whose calls end as `ends` says, and which must be waiting for them."""

    has_failed = False

    def __init__(self) -> None:
        self.ends: deque[list[Call]] = deque()
        self.num_waits = 0
        self.waited: set[Call] = set()  # the calls that the last wait was for

    def wait(self, calls: Sequence[Call], *, reports_beats: bool) -> dict[Call, Any]:
        assert reports_beats
        self.num_waits, self.waited = self.num_waits + 1, set(calls)
        assert self.num_waits < 100, "waits forever"
        ended = self.ends.popleft() if self.ends else calls[:1]
        assert set(ended) <= set(calls)
        return {call: call.result for call in ended}

    def results_within(self, calls: Sequence[Call], _: float) -> list[Any]:
        return [call.result for call in calls]


@dataclass
class Crew:
    engine_actors: list[list[Rank]]
    policy_version: int = 0
    watchdog: Script = field(default_factory=Script)


def crew_of(num_engines: int, num_ranks: int) -> Crew:
    return Crew([[Rank() for _ in range(num_ranks)] for _ in range(num_engines)])


def launch(engines: RayEngines, *which: int) -> None:
    for engine in which:
        engines.launch(engine, Requests(0), slots=1, max_steps=1)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_tick_ends_when_every_rank_has_returned_and_early_results_are_kept(deterministic):
    """Fails when the result of one rank counts for the engine, is forgotten until the others
    return, or a later tick is waited for before it is the oldest.
    """
    crew = crew_of(2, 2)
    engines = RayEngines(crew, deterministic=deterministic)  # type: ignore[arg-type]
    launch(engines, 0, 0, 1)
    (first, follower), (other, others_follower) = (
        (leader.advance.calls, second.follow_advance.calls) for leader, second in crew.engine_actors
    )
    crew.watchdog.ends += [[first[0]], [other[0], others_follower[0]], [follower[0]]]
    if deterministic:
        assert [engine for engine, _ in engines.wait(1.0)] == [0, 1]
    else:
        assert [engine for engine, _ in engines.wait(1.0)] == [1]
        assert [engine for engine, _ in engines.wait(1.0)] == [0]
    assert crew.watchdog.waited.isdisjoint({first[1], follower[1]})
    crew.watchdog.ends += [[follower[1], first[1]]]
    assert [engine for engine, _ in engines.wait(1.0)] == [0]


def test_ticks_that_end_shortly_after_another_are_processed_together():
    """Fails when the first tick to end is processed by itself although `gather_s` is given."""
    crew = crew_of(2, 1)
    engines = RayEngines(crew, deterministic=False)  # type: ignore[arg-type]
    launch(engines, 0, 1)
    crew.watchdog.ends.append([ranks[0].advance.calls[0] for ranks in crew.engine_actors])
    started = time.monotonic()
    assert [engine for engine, _ in engines.wait(1.0, gather_s=0.05)] == [0, 1]
    assert time.monotonic() - started >= 0.05


def test_after_an_abort_earlier_ticks_are_not_waited_for():
    """Fails when a part of a tick remains, or ticks of a new step are not waited for."""
    crew = crew_of(2, 2)
    engines = RayEngines(crew, deterministic=False)  # type: ignore[arg-type]
    launch(engines, 0, 0, 1)
    leader, follower = crew.engine_actors[0]
    ones_leader, ones_follower = crew.engine_actors[1]
    crew.watchdog.ends += [
        [leader.advance.calls[0]],
        [ones_leader.advance.calls[0], ones_follower.follow_advance.calls[0]],
    ]
    assert [engine for engine, _ in engines.wait(1.0)] == [1]
    assert engines.abort(1.0) == ([], [])
    launch(engines, 0)
    new = [leader.advance.calls[2], follower.follow_advance.calls[2]]
    crew.watchdog.ends.append(new)
    assert [engine for engine, _ in engines.wait(1.0)] == [0]
    assert crew.watchdog.waited == set(new)


def lines_per_tick(num_engines: int) -> float:
    """Count the lines of engines.py that run for a tick, with two ticks in progress on
    each engine.
    """
    engines = RayEngines(crew_of(num_engines, 1), deterministic=False)  # type: ignore[arg-type]
    launch(engines, *range(num_engines), *range(num_engines))
    lines = 0

    def count(frame: Any, event: str, _: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count if frame.f_code.co_filename.endswith("training/runtime/engines.py") else None

    sys.settrace(count)
    try:
        for _ in range(20):
            launch(engines, *(engine for engine, _ in engines.wait(60.0)))
    finally:
        sys.settrace(None)
    return lines / 20


def test_a_tick_costs_the_same_for_any_number_of_engines():
    """Fails when a tick looks at every engine."""
    assert lines_per_tick(256) < 1.1 * lines_per_tick(4)
