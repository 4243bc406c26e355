"""Hundreds of engines, thousands of groups: what is done for one makes no loop over all."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_runs import Run, Setup, constant, lognormal

from april_rl.rollout import collector
from april_rl.rollout.least_loaded import LeastLoaded
from april_rl.rollout.no_cycles import cycle_search_put_off
from april_rl.rollout.open_group import OpenGroup
from april_rl.rollout.sample_table import NOBODY
from april_rl.rollout.slots import Slots
from april_rl.types import Group, SampleId

ROLLOUT = Path(collector.__file__).parent
NOT_THE_CONTROLLER = {"serial.py", "ports.py", "requests.py", "seeds.py"}

LOADS = st.tuples(st.booleans(), st.integers(0, 1).map(float))
# Long enough for outdated entries to be removed, which asking for the least does as well.
CHANGES = st.lists(st.tuples(st.integers(0, 3), st.none() | LOADS), min_size=60, max_size=120)


@given(CHANGES, st.sampled_from([1, 7, 60]))
def test_the_least_loaded_is_the_minimum_whatever_changes(changes, asked_every):
    """Fails when an outdated entry of the heap is believed, ties go to a later one, or a member is
    forgotten when outdated entries are removed.
    """
    engines, expected = LeastLoaded(), {}
    for number, (engine, load) in enumerate(changes, start=1):
        if load is None:
            engines.discard(engine)
            expected.pop(engine, None)
        else:
            engines.put(engine, load)
            expected[engine] = load
        assert engines.loads == expected
        if number % asked_every == 0:
            assert engines.least() == min(expected, key=lambda e: (expected[e], e), default=None)


def test_outdated_loads_do_not_pile_up():
    """Fails when outdated entries stay for the whole step."""
    engines = LeastLoaded()
    engines.put(3, (False, -1.0))  # the least, below which they would stay
    for change in range(10_000):
        engines.put(change % 3, (False, float(change)))
        assert engines.least() == 3
    assert len(engines._heap) < 50


class PlainSlots:
    """The rule as it is told: the minimum over all engines on offer that have room."""

    def __init__(self, slots: Slots, *, num_engines: int, lookahead: int) -> None:
        self.slots, self.lookahead = slots, lookahead
        self.offered = set(range(num_engines))
        self.home: dict[SampleId, int] = {}
        self.siblings: dict[int, int] = {}
        self.held: dict[SampleId, tuple[int, float]] = {}

    def choose(self, sample_id: SampleId) -> int | None:
        return min(
            (e for e in self.offered if self.num_held(e) < self.most(e)),
            key=lambda e: (
                self.queues(e),
                e != self.home.get(sample_id),
                e != self.siblings.get(sample_id.prompt_id),
                sum(cost for engine, cost in self.held.values() if engine == e),
                e,
            ),
            default=None,
        )

    def put_all(self, ids: list[SampleId], cost: float) -> tuple[int, int] | None:
        """One after another while they go to the slots of one engine, or to its queue: which, and
        how many.
        """
        first, count = self.choose(ids[0]), 0
        if first is None:
            return None
        queues = self.queues(first)
        while (
            count < len(ids) and self.choose(ids[count]) == first and self.queues(first) == queues
        ):
            self.held[ids[count]] = first, cost
            self.home[ids[count]] = self.siblings[ids[count].prompt_id] = first
            count += 1
        return first, count

    def queues(self, engine: int) -> bool:
        return self.num_held(engine) >= self.slots.slots(engine)

    def num_held(self, engine: int) -> int:
        return sum(held == engine for held, _ in self.held.values())

    def most(self, engine: int) -> int:
        slots = self.slots.slots(engine)
        return slots + self.lookahead if slots else 0


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(0, 5), st.integers(1, 4), st.integers(1, 4)),
        st.tuples(st.just("back"), st.integers(0, 99)),
        st.tuples(st.sampled_from(["offer", "withdraw"]), st.integers(0, 2)),
    ),
    min_size=20,
    max_size=60,
)


@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 3), EVENTS)
def test_the_chosen_engine_is_that_of_a_search_through_all(
    num_engines, num_slots, lookahead, events
):
    """Fails when an engine that was withdrawn is chosen, one that is offered again stays unknown, a
    sample that comes back leaves the old load, or a queue comes before a free slot.
    """
    slots = Slots(num_engines=num_engines, num_slots=num_slots, lookahead=lookahead)
    plain = PlainSlots(slots, num_engines=num_engines, lookahead=lookahead)
    for kind, *what in events:
        if kind == "come":
            prompt_id, count, cost = what
            ids = [SampleId(prompt_id, index) for index in range(6)]
            ids = [id_ for id_ in ids if id_ not in plain.held][:count]
            if not ids:
                continue
            homes = [plain.home.get(id_, NOBODY) for id_ in ids]
            assert slots.has_room == (plain.choose(ids[0]) is not None)
            chosen = slots.choose(homes, plain.siblings.get(prompt_id, NOBODY))
            one_by_one = plain.put_all(ids, float(cost))
            assert chosen == one_by_one
            if chosen is not None:
                slots.put(chosen[0], count=chosen[1], work=float(cost) * chosen[1])
        elif kind == "back" and plain.held:
            sample_id = sorted(plain.held)[what[0] % len(plain.held)]
            engine, work = plain.held.pop(sample_id)
            numbers = np.arange(num_engines) == engine
            slots.put_all(-numbers.astype(np.int64), -work * numbers)
        elif kind == "offer" and what[0] < num_engines:
            slots.offer([what[0]])
            plain.offered.add(what[0])
        elif kind == "withdraw" and what[0] < num_engines:
            slots.withdraw([what[0]])
            plain.offered.discard(what[0])


@pytest.mark.parametrize("reject_every", [0, 3])
def test_versions_are_counted_as_the_groups_have_them(reject_every):
    """Fails when a group that becomes ready, is rejected, trained or restored stays counted, or one
    that gets its first token does not move, or versions of the past are kept.
    """
    setup = Setup(alpha=2.5, law=lognormal(30, 0.9), budget=200, reject_every=reject_every)
    run = Run(setup)
    seen = set()
    for _ in range(12):
        run.step()
        if run.version == 6:
            run = _restored(run)
        buffer = run.collector.buffer
        oldest = [_oldest_version(group) for group in buffer.open_groups()]
        expected = Counter(run.version if version is None else version for version in oldest)
        assert +buffer.open_versions(policy_version=run.version) == expected
        assert +buffer.ready_versions() == Counter(
            scored.group.oldest_version for scored in buffer.ready_groups()
        )
        assert len(buffer.open_versions(policy_version=run.version)) <= setup.max_staleness + 2
        assert len(buffer.ready_versions()) <= setup.max_staleness + 1
        seen |= expected.keys()
    assert len(seen) > 5


def _oldest_version(group: OpenGroup) -> int | None:
    return Group(prompt=group.prompt, samples=tuple(group.samples)).oldest_version


def _restored(run: Run) -> Run:
    again = Run(run.setup, prompts=run.prompts)
    again.collector.restore(run.collector.save())
    again.version = run.version
    return again


def calls_per_event(num_engines: int) -> float:
    """Python calls that a step makes in the collector's files, for each tick and each sample that
    is sent or comes back, with four samples an engine in flight.
    """
    setup = Setup(num_groups=2 * num_engines, law=lognormal(20, 0.7), budget=200, refill=True)
    run = Run(replace(setup, num_engines=num_engines, alpha=1.0, deterministic=False))
    run.step()
    calls = 0

    def count(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        path = Path(frame.f_code.co_filename)
        calls += event == "call" and path.parent == ROLLOUT and path.name not in NOT_THE_CONTROLLER

    ticks, requests = run.fakes.num_ticks, sum(len(e.requests) for e in run.fakes.each)
    sys.setprofile(count)
    try:
        run.step()
    finally:
        sys.setprofile(None)
    sent = sum(len(e.requests) for e in run.fakes.each) - requests
    return calls / (run.fakes.num_ticks - ticks + sent)


def test_an_event_costs_the_same_with_sixteen_times_as_many_engines():
    """Fails when a tick or a request has Python look through all engines, or a tick through all
    groups.
    """
    assert calls_per_event(64) < 1.2 * calls_per_event(4)


def test_the_search_for_cycles_goes_on_after_a_step_also_when_that_fails():
    """Fails when a step leaves it off, or turns on what the user has turned off."""
    run = Run(Setup(law=constant(5)))
    inside = []
    run.fakes.each[0].on_step = lambda *_: inside.append(gc.isenabled())
    assert gc.isenabled()
    run.step()
    assert gc.isenabled()
    assert inside
    assert not any(inside)
    with pytest.raises(ValueError, match="as planned"), cycle_search_put_off():
        raise ValueError("as planned")
    assert gc.isenabled()
    gc.disable()
    try:
        with cycle_search_put_off():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_a_rollout_leaves_behind_is_not_searched_at_once():
    """Fails when the first object made after a step has Python look at all that the step made."""
    assert gc.isenabled()
    gc.collect()  # so that the next search is one of the youngest
    with cycle_search_put_off():
        made = [[number] for number in range(2000)]
    old = {id(each) for each in gc.get_objects(generation=2)}
    assert old.issuperset(map(id, made))
    assert gc.get_freeze_count() == 0
