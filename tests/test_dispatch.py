"""Samples on their way to the engines: who gets them, and when."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from fake_engine import FakeEngines
from hypothesis import given
from hypothesis import strategies as st
from light_samples import PROMPT, completion
from rollout_runs import Run, Setup, lognormal
from sent_samples import Sent

from april_rl.errors import RunError
from april_rl.rollout.dispatch import Dispatch
from april_rl.rollout.ledger import State
from april_rl.rollout.requests import Requests
from april_rl.rollout.sample_table import NOBODY, SampleTable, view
from april_rl.ticks import Completions, Tick
from april_rl.types import Prompt


def test_what_is_sent_waits_no_more_and_says_what_it_has_to_compute():
    """Fails when one is sent twice, more than may be started, the response so far is not among the
    tokens to prefill, or a sample goes to another engine than its sibling though that has room.
    """
    sent = Sent(group_size=4)
    group = sent.groups.open(PROMPT)
    view(sent.table.lengths)[group.rows] = [5, 0, 0, 7]
    sent.dispatch.add(group.rows)
    assert sent.dispatch.submit(limit=2.0) == 2
    assert sent.dispatch.num_waiting == 2
    assert sent.dispatch.submit(limit=math.inf) == 2
    assert sent.dispatch.num_waiting == 0
    assert not sent.table.work[group.rows.start]
    sent.dispatch.launch()
    assert sent.table.work[group.rows.start : group.rows.stop].tolist() == [8.0, 3.0, 3.0, 10.0]
    assert set(sent.table.homes[group.rows.start : group.rows.stop]) == {0}


def test_samples_go_home_as_a_step_begins_the_oldest_first():
    """Fails when a home gets more than it has room for or others than the oldest, what goes home
    still waits, or more is sent than may be started.
    """
    sent = Sent(group_size=4, num_slots=4)  # two slots an engine, one more in its queue
    rows = [*sent.groups.open(PROMPT).rows, *sent.groups.open(replace(PROMPT, id=2)).rows]
    view(sent.table.homes)[rows] = [0, NOBODY, 0, 0, 0, 1, 0, 0]
    assert sent.dispatch.send_home(np.array(rows), limit=math.inf) == 3
    assert sent.dispatch.num_waiting == 5
    assert sent.pending() == {0: [rows[0], rows[2]], 1: [rows[5]]}
    assert [row for group in sent.dispatch._waiting for row in group] == [
        rows[number] for number in (1, 3, 4, 6, 7)
    ]
    sent.dispatch.begin(num_slots=4)
    assert sent.dispatch.send_home(np.array(rows), limit=3.0) == 2
    assert sent.pending() == {0: [rows[0], rows[2]]}
    sent.dispatch.begin(num_slots=4)
    view(sent.table.homes)[rows] = [0, 0, 1, 1, 0, 0, 1, 0]  # they fill all slots
    assert sent.dispatch.send_home(np.array(rows), limit=math.inf) == 5
    assert sent.pending() == {0: [rows[0], rows[1], rows[4]], 1: rows[2:4]}


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.integers(-1, 3), min_size=3, max_size=3)),
        st.tuples(st.just("submit"), st.sampled_from([1.0, 4.0, math.inf])),
        st.tuples(st.sampled_from(["offer", "withdraw", "back"]), st.integers(0, 3)),
    ),
    max_size=40,
)


@given(st.integers(1, 4), st.integers(1, 24), EVENTS)
def test_samples_are_sent_once_each_in_order_and_queue_only_where_no_slot_is_free(
    num_engines, num_slots, events
):
    """Fails when a sample is sent twice or not at all though there is room, more are sent than may
    be, one passes another on its engine, an engine gets more than it has room for or something
    while it is not on offer, or a sample queues while another engine has a free slot.
    """
    sent = Sent(group_size=3, num_engines=num_engines, num_slots=num_slots)
    dispatch, slots = sent.dispatch, sent.dispatch._slots
    engines, added = range(num_engines), list[int]()
    offered = set(engines)
    for number, (kind, what) in enumerate(events):
        if kind == "add":
            group = sent.groups.open(replace(PROMPT, id=number))
            view(sent.table.homes)[group.rows] = [n if n < num_engines else NOBODY for n in what]
            dispatch.add(group.rows)
            added += group.rows
        elif kind == "submit":
            waiting, room, before = dispatch.num_waiting, dispatch.room, sent.in_flight()
            assert dispatch.submit(limit=what) == min(waiting, room, what)
            now = sent.in_flight()
            got = {engine for engine in engines if now[engine] > before[engine]}
            assert got <= offered
            queues = {engine for engine in got if now[engine] > slots.slots(engine)}
            assert not (queues and any(now[e] < slots.slots(e) for e in offered))
            assert max(now) <= math.ceil(num_slots / num_engines) * 5 / 4 + 1
        elif what < num_engines and kind == "back" and slots.in_flight(what):
            one = (np.arange(num_engines) == what).astype(np.int64)
            slots.put_all(-one, 0.0 * one)
        elif what < num_engines and kind != "back":
            offered = offered | {what} if kind == "offer" else offered - {what}
            getattr(slots, kind)([what])
    pending = sent.pending().values()
    assert all(rows == sorted(rows) for rows in pending)
    waiting = [row for group in dispatch._waiting for row in group]
    assert len(waiting) == dispatch.num_waiting
    assert sorted([*waiting, *(row for rows in pending for row in rows)]) == added
    assert waiting == sorted(waiting)


def test_a_sample_queues_where_it_was_before():
    """Fails when it queues behind the least work like a new one, for its state may be there."""
    sent = Sent(group_size=2, num_engines=2, num_slots=16)
    for engine, work in enumerate((30.0, 10.0)):
        sent.dispatch._slots.put(engine, count=8, work=work)
    resumed, new = (sent.groups.open(replace(PROMPT, id=number)) for number in (1, 2))
    view(sent.table.homes)[resumed.rows] = [NOBODY, 0]
    sent.dispatch.add(resumed.rows)
    sent.dispatch.add(new.rows)
    assert sent.dispatch.submit(limit=math.inf) == 4
    assert sent.pending() == {0: [resumed.rows[1], new.rows[1]], 1: [resumed.rows[0], new.rows[0]]}


def test_new_samples_queue_behind_the_least_work():
    """Fails when an engine with more to do gets them first, or more than it has room for."""
    sent = Sent(group_size=4, num_engines=3, num_slots=24)  # eight slots and two queued an engine
    for engine, work in enumerate((30.0, 10.0, 20.0)):
        sent.dispatch._slots.put(engine, count=8, work=work)
    first, second = (sent.groups.open(replace(PROMPT, id=number)) for number in (1, 2))
    sent.dispatch.add(first.rows)
    sent.dispatch.add(second.rows)
    assert sent.dispatch.submit(limit=3.0) == 3
    assert sent.pending() == {1: [*first.rows[:2]], 2: [first.rows[2]]}
    assert sent.dispatch.submit(limit=math.inf) == 3
    assert sent.pending() == {
        0: [*second.rows[:2]],
        1: [*first.rows[:2]],
        2: [*first.rows[2:]],
    }
    assert sent.dispatch.num_waiting == 2


def test_what_is_left_of_a_group_follows_its_queued_siblings():
    """Fails when it goes where the least work is, though their engine has a slot again."""
    sent = Sent(group_size=4, num_engines=2, num_slots=16)  # eight slots and two queued an engine
    slots = sent.dispatch._slots
    for engine, work in enumerate((30.0, 10.0)):
        slots.put(engine, count=8, work=work)
    group = sent.groups.open(PROMPT)
    sent.dispatch.add(group.rows)
    assert sent.dispatch.submit(limit=2.0) == 2
    assert sent.pending() == {1: [*group.rows[:2]]}
    slots.put_all(np.array([-4, -4]), np.array([-30.0, 0.0]))
    assert sent.dispatch.submit(limit=math.inf) == 2
    assert sent.pending() == {1: [*group.rows]}


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_launch_that_fails_is_what_the_run_ends_with(number):
    """Fails when samples that were to be launched after it count as lost, or it loses any."""
    run = Run(Setup(law=lognormal(20, 0.5), group_size=2, num_engines=3, alpha=2.0))
    launch, launched = run.fakes.launch, 0

    def fail(engine: int, submit: Requests, *, slots: int, max_steps: int) -> None:
        nonlocal launched
        launched += 1
        if launched == number:
            raise RunError("the engine is gone")
        launch(engine, submit, slots=slots, max_steps=max_steps)

    run.fakes.launch = fail  # type: ignore[method-assign]
    with pytest.raises(RunError, match="the engine is gone"):
        run.step()
    assert run.fakes.generated == run.num_tokens_held()
    assert run.collector.ledger.count(State.in_flight) == 0
    run.drain()


@pytest.mark.parametrize("number", range(1, 9))
def test_a_prompt_that_cannot_be_read_is_what_the_run_ends_with(number):
    """Fails when samples that were chosen for an engine and not yet launched count as lost."""
    run = Run(Setup(law=lognormal(20, 0.5), group_size=2, num_engines=2))
    take = run.prompts.take

    def fail() -> Prompt:
        if len(run.prompts.taken) == number:
            raise RunError(f"prompts.jsonl:{number}: no answer")
        return take()

    run.prompts.take = fail  # type: ignore[method-assign]
    with pytest.raises(RunError, match="no answer"):
        run.steps(9)
    assert run.fakes.generated == run.num_tokens_held()
    assert run.collector.ledger.count(State.in_flight) == 0


def test_a_group_does_not_follow_the_one_whose_place_it_took():
    """Fails when the engine of a closed group stands for the siblings of the next one there."""
    sent = Sent(group_size=1, num_slots=4)
    first = sent.groups.open(PROMPT)
    sent.dispatch.add(first.rows)
    sent.dispatch.submit(limit=math.inf)
    sent.groups.buffer.remove([first.place])
    second = sent.groups.open(replace(PROMPT, id=2))
    assert second.place == first.place
    sent.dispatch.add(second.rows)
    sent.dispatch.submit(limit=math.inf)
    sent.dispatch.launch()
    assert sent.table.homes[second.rows[0]] == 1, "engine 0 has more to do"


def test_the_work_of_an_engine_goes_as_it_came():
    """Fails when what an engine has to compute for samples that went home is not counted, or what
    comes back is taken off another engine.
    """
    sent = Sent(group_size=2, num_slots=4)
    rows = np.array(sent.groups.open(PROMPT).rows)
    view(sent.table.homes)[rows] = [1, 0]
    view(sent.table.lengths)[rows] = [20, 0]
    sent.dispatch.send_home(rows, limit=math.inf)
    sent.dispatch.launch()
    loads = sent.dispatch._slots._outstanding
    assert [*loads] == [3.0, 23.0]
    parts = [completion(index, start=20 - 20 * index, num_tokens=1, version=3) for index in (0, 1)]
    came = Completions(parts)
    sent.dispatch.free(sent.groups.extend(came, sent.stats, engines=np.array([1, 0])))
    assert [*loads] == [0.0, 0.0]


def test_samples_are_sent_the_oldest_prompt_first_wherever_they_lie():
    """Fails when they are sent in the order of their rows, though a younger prompt has the place
    of one that is gone; or an older one that joins those that went home comes behind them.
    """
    sent = Sent(group_size=2, num_engines=1, num_slots=8)
    gone = sent.groups.open(PROMPT)
    old, other = (sent.groups.open(replace(PROMPT, id=number)) for number in (3, 4))
    sent.groups.buffer.remove([gone.place])
    young = sent.groups.open(replace(PROMPT, id=5))
    assert young.place < old.place < other.place
    rows = sent.groups.buffer.unfinished()
    view(sent.table.homes)[rows] = [NOBODY, 0, NOBODY, NOBODY, 0, 0]
    sent.dispatch.send_home(rows, limit=math.inf)
    sent.dispatch.submit(limit=math.inf)
    sent.dispatch.launch()
    sent.dispatch.wait(1.0)
    engine = sent.dispatch._engines.each[0]
    assert [request.sample_id for request in engine.requests] == [
        (prompt_id, index) for prompt_id in (3, 4, 5) for index in (0, 1)
    ]


@pytest.mark.parametrize(
    ("num_engines", "tick_s", "gather_s"), [(63, 1.6, 0.0), (64, 0.8, 0.2), (64, 600.0, 0.25)]
)
def test_many_engines_are_waited_for_together(num_engines, tick_s, gather_s):
    """Fails when few engines wait for company, or many are asked one by one, or for longer than
    engines that have another tick can do without.
    """
    asked: list[float] = []

    class Asked(FakeEngines):
        def wait(self, timeout_s: float, *, gather_s: float = 0.0) -> list[tuple[int, Tick]]:
            asked.append(gather_s)
            self.launch(0, Requests(1, 0), slots=1, max_steps=1)
            ended = super().wait(timeout_s, gather_s=gather_s)
            return [(engine, replace(tick, elapsed_s=tick_s)) for engine, tick in ended]

    engines = Asked(lognormal(9, 0.9), num_engines=num_engines, budget=40)
    dispatch = Dispatch(engines, SampleTable(1), tick_steps=4, max_response_tokens=40, seed=0)
    dispatch.wait(1.0)
    dispatch.wait(1.0)
    assert asked == pytest.approx([0.0, gather_s])
