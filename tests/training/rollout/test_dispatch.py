"""How samples are sent to engines: which engine gets them, and when."""

import math
from dataclasses import replace

import pytest
from fake_engine import FakeEngines
from hypothesis import given
from hypothesis import strategies as st
from light_samples import completion
from rollout_runs import Run, Setup, lognormal
from sent_samples import RULES, VERSION, Sent, record

from april_rl.errors import RunError
from april_rl.training.rollout.dispatch import Dispatch, ExpectedLength
from april_rl.training.rollout.open_group import SampleState
from april_rl.training.rollout.record import GroupState
from april_rl.training.rollout.requests import Requests
from april_rl.training.rollout.ticks import Tick
from april_rl.types import Prompt, SampleId


def ids(prompt_id: int, *indices: int) -> list[SampleId]:
    return [SampleId(prompt_id, index) for index in indices]


def test_a_sent_sample_no_longer_waits_and_adds_its_outstanding_tokens():
    """Fails when one is sent twice, more are sent than may be started, the response so far is not
    among the tokens to prefill, or a sample does not go to its sibling's engine although that has
    room.
    """
    sent = Sent(group_size=4)
    group = sent.open(1)
    group.ends = [5, 0, 0, 7]
    sent.dispatch.add(group)
    assert sent.dispatch.assign(limit=2) == 2
    assert sent.dispatch.num_waiting == 2
    assert sent.dispatch.assign(limit=1000) == 2
    assert sent.dispatch.num_waiting == 0
    assert group.outstanding_tokens == [8.0, 3.0, 3.0, 10.0]
    assert set(group.states) == {SampleState.running}
    assert set(group.engines) == {0}


def test_samples_return_to_their_engines_as_a_step_begins_the_oldest_first():
    """Fails when an engine gets back more samples than it has slots, or not the oldest ones, when a
    returned sample still waits, or more are sent than may be started.
    """
    sent = Sent(group_size=4, num_slots=4)  # two slots for each engine
    first = sent.open(1, engines=[0, None, 0, 0])
    second = sent.open(2, engines=[0, 1, 0, 0])
    for group in (first, second):
        sent.dispatch.add(group)
    assert sent.dispatch.return_to_engines(limit=1000) == 3
    assert sent.assignments() == {0: ids(1, 0, 2), 1: ids(2, 1)}
    assert sent.waiting() == [*ids(1, 1, 3), *ids(2, 0, 2, 3)]
    assert sent.dispatch.num_waiting == 5


def test_no_more_samples_return_to_engines_than_may_be_started():
    """Fails when a younger sample returns to its engine and therefore an older one may not be
    started.
    """
    sent = Sent(group_size=4, num_slots=4)
    for group in (sent.open(1, engines=[0, None, 0, 0]), sent.open(2, engines=[1] * 4)):
        sent.dispatch.add(group)
    assert sent.dispatch.return_to_engines(limit=3) == 2
    assert sent.assignments() == {0: ids(1, 0, 2)}


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.none() | st.integers(0, 3), min_size=3, max_size=3)),
        st.tuples(st.just("assign"), st.sampled_from([1, 4, 1000])),
        st.tuples(st.sampled_from(["offer", "withdraw", "back"]), st.integers(0, 3)),
    ),
    max_size=40,
)


@given(st.integers(1, 4), st.integers(1, 24), EVENTS)
def test_samples_are_sent_once_in_order_and_queue_only_where_no_slot_is_free(
    num_engines, num_slots, events
):
    """Fails when a sample is sent twice, or not at all though there is room, when more are sent
    than may be, when one overtakes another on its engine, when an engine gets more than it has room
    for or is not available, or when a sample queues while another engine has a free slot.
    """
    sent = Sent(group_size=3, num_engines=num_engines, num_slots=num_slots)
    dispatch, slots = sent.dispatch, sent.dispatch.slots
    engines, added = range(num_engines), list[SampleId]()
    offered = set(engines)
    for number, (kind, what) in enumerate(events):
        if kind == "add":
            known = [n if n is not None and n < num_engines else None for n in what]
            dispatch.add(sent.open(number, engines=known))
            added += ids(number, 0, 1, 2)
        elif kind == "assign":
            waiting, room, before = dispatch.num_waiting, slots.room, sent.in_flight()
            assert dispatch.assign(limit=what) == min(waiting, room, what)
            now = sent.in_flight()
            got = {engine for engine in engines if now[engine] > before[engine]}
            assert got <= offered
            queues = {engine for engine in got if now[engine] > slots.slots(engine)}
            assert not (queues and any(now[e] < slots.slots(e) for e in offered))
            assert max(now) <= math.ceil(num_slots / num_engines) * 5 / 4 + 1
        elif what < num_engines and kind == "back" and slots.in_flight(what):
            slots.remove(what, tokens=0.0)
        elif what < num_engines and kind != "back":
            offered = offered | {what} if kind == "offer" else offered - {what}
            getattr(slots, kind)(what)
    assigned = sent.assignments().values()
    assert all(samples == sorted(samples) for samples in assigned)
    waiting = sent.waiting()
    assert len(waiting) == dispatch.num_waiting
    assert sorted([*waiting, *(each for samples in assigned for each in samples)]) == added


def test_a_sample_queues_at_its_former_engine():
    """Fails when it queues at the engine with the least work like a new one; its former engine may
    still hold its state.
    """
    sent = Sent(group_size=2, num_engines=2, num_slots=16)
    fill(sent, 30.0, 10.0)
    sent.dispatch.add(sent.open(1, engines=[None, 0]))
    assert sent.dispatch.assign(limit=1000) == 2
    assert sent.assignments() == {0: ids(1, 1), 1: ids(1, 0)}


def fill(sent: Sent, *tokens: float) -> None:
    """Fill all eight slots of each engine with requests of that many tokens in total."""
    for engine, total in enumerate(tokens):
        for _ in range(8):
            sent.dispatch.slots.add(engine, tokens=total / 8)


def test_the_rest_of_a_group_queues_at_the_same_engine_as_its_siblings():
    """Fails when the rest goes to the engine with the least work although the siblings' engine has
    a slot again.
    """
    # Eight slots and two queued requests for each engine.
    sent = Sent(group_size=4, num_engines=2, num_slots=16)
    fill(sent, 30.0, 10.0)
    sent.dispatch.add(sent.open(1))
    assert sent.dispatch.assign(limit=2) == 2
    assert sent.assignments() == {1: ids(1, 0, 1)}
    for engine, tokens in ((0, 30.0), (1, 0.0)):
        for _ in range(4):
            sent.dispatch.slots.remove(engine, tokens=tokens / 4)
    assert sent.dispatch.assign(limit=1000) == 2
    assert sent.assignments() == {1: ids(1, 0, 1, 2, 3)}


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_run_ends_with_the_error_of_a_failed_launch(number):
    """Fails when samples that were to be launched later count as lost, or the failed launch loses
    any.
    """
    run = Run(Setup(length_of=lognormal(20, 0.5), group_size=2, num_engines=3, alpha=2.0))
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
    assert run.buffer.counts()[GroupState.in_flight] == 0
    run.drain()


@pytest.mark.parametrize("number", range(1, 9))
def test_a_run_ends_with_the_error_of_an_unreadable_prompt(number):
    """Fails when samples that were assigned to an engine and not yet launched count as lost."""
    run = Run(Setup(length_of=lognormal(20, 0.5), group_size=2, num_engines=2))
    take = run.prompts.take

    def fail() -> Prompt:
        if len(run.prompts.taken) == number:
            raise RunError(f"prompts.jsonl:{number}: no answer")
        return take()

    run.prompts.take = fail  # type: ignore[method-assign]
    with pytest.raises(RunError, match="no answer"):
        run.steps(9)
    assert run.fakes.generated == run.num_tokens_held()
    assert run.buffer.counts()[GroupState.in_flight] == 0


def test_outstanding_tokens_return_to_zero_when_samples_end():
    """Fails when tokens are not counted for samples that returned to their engine, or are
    subtracted from another engine.
    """
    sent = Sent(group_size=2, num_slots=4)
    group = sent.open(1, engines=[1, 0])
    group.ends = [20, 0]
    sent.dispatch.add(group)
    sent.dispatch.return_to_engines(limit=1000)
    slots = sent.dispatch.slots
    assert slots._outstanding_tokens == [3.0, 23.0]
    for index in (0, 1):
        part = completion(index, start=20 - 20 * index, num_tokens=1, version=3)
        [(_, back)] = sent.groups.extend([part], policy_version=VERSION, engine=1 - index)
        sent.dispatch.take_back(group, back)
    assert slots._outstanding_tokens == [0.0, 0.0]
    assert sent.in_flight() == [0, 0]


def test_an_engine_gets_the_samples_of_the_oldest_prompts_first():
    """Fails when samples that returned to their engine go before an older sample that
    joins them.
    """
    sent = Sent(group_size=2, num_engines=1, num_slots=8)
    for prompt_id, engines in ((3, [None, 0]), (4, [None, None]), (5, [0, 0])):
        sent.dispatch.add(sent.open(prompt_id, engines=engines))
    sent.dispatch.return_to_engines(limit=1000)
    sent.dispatch.assign(limit=1000)
    sent.dispatch.launch()
    sent.dispatch.wait(1.0)
    assert [request.sample_id for request in sent.engines.each[0].requests] == [
        (prompt_id, index) for prompt_id in (3, 4, 5) for index in (0, 1)
    ]


@pytest.mark.parametrize(
    ("num_engines", "tick_s", "gather_s"), [(63, 1.6, 0.0), (64, 0.8, 0.2), (64, 600.0, 0.25)]
)
def test_many_engines_are_waited_for_together(num_engines, tick_s, gather_s):
    """Fails when it waits for few engines together, or for many one by one, or longer than engines
    can compute on with their queued tick.
    """
    asked: list[float] = []

    class Asked(FakeEngines):
        def wait(self, timeout_s: float, *, gather_s: float = 0.0) -> list[tuple[int, Tick]]:
            asked.append(gather_s)
            self.launch(0, Requests(0), slots=1, max_steps=1)
            ended = super().wait(timeout_s, gather_s=gather_s)
            return [(engine, replace(tick, elapsed_s=tick_s)) for engine, tick in ended]

    engines = Asked(lognormal(9, 0.9), num_engines=num_engines, budget=40)
    dispatch = Dispatch(engines, RULES, ExpectedLength(), record(num_slots=64))
    dispatch.wait(1.0)
    dispatch.wait(1.0)
    assert asked == pytest.approx([0.0, gather_s])


def test_an_error_while_parked_samples_are_resumed_parks_them_again(monkeypatch):
    """Fails when a step resumes them before it can return them."""
    run = Run(Setup())
    run.step()
    parked = run.buffer.counts()[GroupState.parked]

    def fail(*_: object, **__: object) -> int:
        raise RunError("an engine is gone")

    with monkeypatch.context() as patched:
        patched.setattr(Dispatch, "return_to_engines", fail)
        with pytest.raises(RunError, match="an engine is gone"):
            run.step()
    assert run.buffer.counts()[GroupState.parked] == parked > 0
    assert run.step().groups
