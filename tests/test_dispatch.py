"""Samples on their way to the engines and back: who gets them, and what counts of what comes."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from fake_engine import FakeEngines, FakeScorer
from hypothesis import given
from hypothesis import strategies as st
from light_samples import PROMPT, completion
from rollout_runs import Run, Setup, lognormal

from april_rl.errors import RunError
from april_rl.rollout.dispatch import Dispatch
from april_rl.rollout.groups import Groups
from april_rl.rollout.ledger import LedgerError, State
from april_rl.rollout.open_group import OpenGroup
from april_rl.rollout.requests import Requests
from april_rl.rollout.sample_table import NOBODY, SampleTable, view
from april_rl.rollout.slots import Slots
from april_rl.rollout.stats import StepStats
from april_rl.ticks import Completions, Tick
from april_rl.types import Completion, Prompt, SampleId


class Sent:
    """Groups of samples that engines have, for a dispatch that sends them."""

    def __init__(self, *, group_size: int, num_engines: int = 2, num_slots: int = 8) -> None:
        self.groups = Groups(FakeScorer(), group_size=group_size, keep=lambda _: True)
        self.table = self.groups.buffer.table
        engines = FakeEngines(lognormal(9, 0.9), num_engines=num_engines, budget=40)
        self.dispatch = Dispatch(engines, self.table, tick_steps=4, max_response_tokens=40, seed=0)
        self.dispatch.begin(num_slots=num_slots)
        self.stats = StepStats(num_slots=num_slots, policy_version=3, clock=lambda: 0.0)

    def extend(self, *completions: Completion, engine: int | None = None) -> list[Completion]:
        """What was awaited of these, from that engine or any."""
        engines = None if engine is None else [engine] * len(completions)
        came = Completions(completions)
        return list(self.groups.extend(came, self.stats, engines=engines).completions)


def test_what_is_sent_waits_no_more_and_says_what_it_has_to_compute():
    """Fails when one is sent twice, more than may be started, the response so far is not among the
    tokens to prefill, or a sample goes to another engine than its sibling though that has room.
    """
    sent = Sent(group_size=4)
    group = sent.groups.open(PROMPT)
    view(sent.table.lengths)[group.rows] = [5, 0, 0, 7]
    waiting = deque([[*group.rows]])
    assert sent.dispatch.submit(waiting, limit=2.0) == 2
    assert list(waiting) == [[*group.rows[2:]]]
    assert sent.dispatch.submit(waiting, limit=math.inf) == 2
    assert not waiting
    assert not sent.table.work[group.rows.start]
    sent.dispatch.launch()
    assert sent.table.work[group.rows.start : group.rows.stop].tolist() == [8.0, 3.0, 3.0, 10.0]
    assert set(sent.table.homes[group.rows.start : group.rows.stop]) == {0}


def sent_to(engine: int) -> tuple[Sent, OpenGroup]:
    """A group of two samples that `engine` has, with 10 tokens to compute for each."""
    sent = Sent(group_size=2)
    group = sent.groups.open(PROMPT)
    view(sent.table.homes)[group.rows] = engine
    view(sent.table.work)[group.rows] = 10.0
    return sent, group


def work(sent: Sent, group: OpenGroup) -> list[float]:
    return [sent.table.work[row] for row in group.rows]


def test_a_sample_grows_once_and_only_by_the_engine_that_has_it():
    """Fails when a completion counts that comes from another engine, of an older version, for
    another place or a second time, or for a sample that no engine has.
    """
    sent, group = sent_to(1)
    part = completion(0, start=0, num_tokens=4, version=3)
    assert sent.extend(part, engine=0) == []
    late = [replace(part, policy_version=2), replace(part, start=1)]
    assert sent.extend(*late, engine=1) == []
    of_nobody = replace(part, sample_id=SampleId(8, 0))
    assert sent.extend(of_nobody, part, part, engine=1) == [part]
    assert (work(sent, group), group.lengths) == ([0.0, 10.0], [4, 0])
    more = completion(0, start=4, num_tokens=4, version=3)
    assert sent.extend(more) == []
    queued = completion(1, start=0, num_tokens=0, version=3)
    assert sent.extend(queued) == [queued]
    stats = sent.stats
    assert (stats.completions, stats.generated_tokens, stats.prompt_tokens) == ([part], 4, 2)
    assert group.oldest_version == 3
    assert group.samples[0].completions == (part,)
    sent.groups.park(stalled=())


def test_what_a_stalled_engine_had_is_asked_for_again_and_what_another_kept_is_lost():
    """Fails when what a stalled engine has counts as lost or stays with it, or what another engine
    did not give back does not.
    """
    sent, group = sent_to(1)
    sent.groups.park(stalled=[1])
    assert sent.groups.ledger.state(1) is State.parked
    assert (work(sent, group), [sent.table.homes[row] for row in group.rows]) == ([0.0] * 2, [1, 1])
    part = completion(0, start=0, num_tokens=4, version=3)
    assert sent.extend(part, engine=1) == []
    assert sent.groups.resume().tolist() == [*group.rows]
    sent.table.homes[group.rows[0]], sent.table.work[group.rows[0]] = 0, 10.0
    assert sent.extend(part, engine=1) == []
    with pytest.raises(LedgerError, match=r"nothing for samples \[.*index=0\)\]"):
        sent.groups.park(stalled=[1])


def test_samples_go_home_as_a_step_begins_the_oldest_first():
    """Fails when a home gets more than it has room for or others than the oldest, what goes home
    still waits, or more is sent than may be started.
    """
    sent = Sent(group_size=4, num_slots=4)  # two slots an engine, one more in its queue
    rows = [*sent.groups.open(PROMPT).rows, *sent.groups.open(replace(PROMPT, id=2)).rows]
    view(sent.table.homes)[rows] = [0, NOBODY, 0, 0, 0, 1, 0, 0]
    assert sent.dispatch.send_home(np.array(rows), limit=math.inf).tolist() == [
        rows[1],
        rows[3],
        rows[4],
        rows[6],
        rows[7],
    ]
    sent.dispatch.launch()
    assert np.flatnonzero(view(sent.table.work)[rows]).tolist() == [0, 2, 5]
    sent.dispatch.begin(num_slots=4)
    assert sent.dispatch.send_home(np.array(rows), limit=3.0).tolist() == [rows[1], *rows[3:]]
    sent.dispatch.begin(num_slots=4)
    view(sent.table.homes)[rows] = [0, 0, 1, 1, 0, 0, 1, 0]  # they fill all slots
    assert sent.dispatch.send_home(np.array(rows), limit=math.inf).tolist() == [rows[5], *rows[6:]]


@given(
    st.integers(1, 4),
    st.integers(0, 12),
    st.integers(1, 3),
    st.lists(st.integers(-1, 3), max_size=30),
    st.sampled_from([3.0, 11.0, math.inf]),
)
def test_as_many_go_home_as_there_is_room_for(num_engines, num_slots, lookahead, homes, limit):
    """Fails when a sample goes home before an older one of the same home, stays away though there
    is a slot, queues there while another engine has one, or comes too early for what may be sent.
    """
    slots = Slots(num_engines=num_engines, num_slots=num_slots, lookahead=lookahead)
    shares = [slots.slots(engine) for engine in range(num_engines)]
    room = [share + lookahead * (share > 0) for share in shares]
    homes = [home if home < num_engines else NOBODY for home in homes]
    goes = slots.at_home(np.array(homes, np.intc), limit=limit).tolist()
    most = int(min(sum(room), limit, len(homes)))
    assert not any(goes[most:])
    taken = [homes[:most].count(engine) for engine in range(num_engines)]
    is_full = all(count >= share for count, share in zip(taken, shares, strict=True))
    for engine in range(num_engines):
        mine = [goes[n] for n in range(most) if homes[n] == engine]
        expected = min(len(mine), room[engine] if is_full else shares[engine])
        assert mine == [True] * expected + [False] * (len(mine) - expected)
    assert not any(goes[n] for n in range(most) if homes[n] == NOBODY)


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
    sent.dispatch.submit(deque([[*first.rows]]), limit=math.inf)
    sent.groups.buffer.remove(first)
    second = sent.groups.open(replace(PROMPT, id=2))
    assert second.place == first.place
    sent.dispatch.submit(deque([[*second.rows]]), limit=math.inf)
    sent.dispatch.launch()
    assert sent.table.homes[second.rows[0]] == 1, "engine 0 has more to do"


def test_a_response_that_ends_without_a_token_is_finished():
    """Fails when it counts as a request that never had a slot."""
    sent, group = sent_to(1)
    last = replace(completion(0, start=0, num_tokens=0, version=3), finish_reason="stop")
    assert sent.extend(last, engine=1) == [last]
    assert [sample.id for sample in group.unscored] == [SampleId(1, 0)]
    assert sent.stats.finished_samples == 1


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
    assert loads == [3.0, 23.0]
    parts = [completion(index, start=20 - 20 * index, num_tokens=1, version=3) for index in (0, 1)]
    came = Completions(parts)
    sent.dispatch.free(sent.groups.extend(came, sent.stats, engines=[1, 0]))
    assert loads == [0.0, 0.0]


def test_samples_are_sent_the_oldest_prompt_first_wherever_they_lie():
    """Fails when they are sent in the order of their rows, though a younger prompt has the place
    of one that is gone.
    """
    sent = Sent(group_size=1, num_engines=1, num_slots=4)
    gone = sent.groups.open(PROMPT)
    old = sent.groups.open(replace(PROMPT, id=2))
    sent.groups.buffer.remove(gone)
    young = sent.groups.open(replace(PROMPT, id=3))
    assert young.place < old.place
    rows = sent.groups.buffer.unfinished()
    view(sent.table.homes)[rows] = 0
    sent.dispatch.send_home(rows, limit=math.inf)
    sent.dispatch.launch()
    sent.dispatch.wait(1.0)
    engine = sent.dispatch._engines.each[0]
    assert [request.sample_id.prompt_id for request in engine.requests] == [2, 3]


@pytest.mark.parametrize(
    ("num_engines", "tick_s", "gather_s"), [(63, 1.6, 0.0), (64, 1.6, 0.2), (64, 600.0, 0.25)]
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


def test_what_came_late_takes_nothing_of_another_engine():
    """Fails when, of what is passed over, the engine, the work or the place of another is kept."""
    sent = Sent(group_size=2)
    rows = [*sent.groups.open(PROMPT).rows]
    view(sent.table.homes)[rows], view(sent.table.work)[rows] = [0, 1], [10.0, 20.0]
    view(sent.table.lengths)[rows] = [0, 5]
    late = replace(completion(0, start=0, num_tokens=1, version=3), policy_version=2)
    came = Completions([late, completion(1, start=5, num_tokens=1, version=3)])
    back = sent.groups.extend(came, sent.stats, engines=[0, 1])
    assert [column.tolist() for column in (back.rows, back.homes, back.work, back.starts)] == [
        [rows[1]],
        [1],
        [20.0],
        [5],
    ]
    assert (sent.stats.resumed_samples, sent.stats.reprefill_tokens) == (1, 2 + 5)
