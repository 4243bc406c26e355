"""Ledger, slots, serial engines and step statistics, each by itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
from fake_engine import FakeEngines
from hypothesis import given
from hypothesis import strategies as st
from rollout_runs import Run, Setup, constant

from april_rl.rollout.buffer import Buffer
from april_rl.rollout.ledger import Ledger, LedgerError, State
from april_rl.rollout.open_group import OpenGroup, lengths_of
from april_rl.rollout.seeds import request_seed
from april_rl.rollout.siblings import Siblings
from april_rl.rollout.slots import Slots
from april_rl.rollout.stats import StepStats
from april_rl.types import Completion, Prompt, SampleId, Score, Tick

FINAL = {State.trained, State.rejected, State.dropped}


@pytest.mark.parametrize("to", [State.in_flight, State.parked, State.trained])
def test_a_ledger_refuses_what_cannot_happen(to):
    """Fails when moves are not checked: nothing is trained, or parked again, that is not ready."""
    ledger = Ledger()
    with pytest.raises(LedgerError, match="cannot go from None"):
        ledger.move(1, to)
    ledger.open(1)
    with pytest.raises(LedgerError, match="opened twice"):
        ledger.open(1)
    ledger.move(1, State.ready)
    if to is not State.trained:
        with pytest.raises(LedgerError, match="cannot go from ready"):
            ledger.move(1, to)
        return
    ledger.move(1, to)
    with pytest.raises(LedgerError):
        ledger.move(1, to)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(State))))
def test_a_ledger_adds_up_whatever_is_asked_of_it(moves):
    """Fails when a final state is not counted, or a refused move counts."""
    ledger, opened = Ledger(), 0
    for prompt_id, state in moves:
        try:
            if state is State.in_flight and ledger.state(prompt_id) is None:
                ledger.open(prompt_id)
                opened += 1
            else:
                ledger.move(prompt_id, state, reason="test")
        except LedgerError:
            pass
        ledger.check(parked=ledger.count(State.parked), ready=ledger.count(State.ready))
        assert ledger.opened == opened == sum(ledger.count(state) for state in State)
    read = ledger.metrics().read()
    assert read["ledger/opened"] == opened
    assert sum(read[f"ledger/{state.value}"] for state in State) == opened
    assert sum(ledger.drop_reasons.values()) == ledger.count(State.dropped)


def test_a_ledger_moves_those_of_one_state_and_no_others():
    """Fails when a ready prompt is parked with the rest, or resumed."""
    ledger = Ledger()
    for prompt_id in range(4):
        ledger.open(prompt_id)
    ledger.move(1, State.ready)
    ledger.move_all(State.in_flight, to=State.parked)
    assert [ledger.state(prompt_id) for prompt_id in range(2)] == [State.parked, State.ready]
    ledger.check(parked=3, ready=1)
    ledger.move_all(State.parked, to=State.in_flight)
    assert (ledger.count(State.in_flight), ledger.count(State.ready)) == (3, 1)
    with pytest.raises(AssertionError):
        ledger.move_all(State.ready, to=State.parked)


def test_a_ledger_that_disagrees_with_the_buffer_says_so():
    ledger = Ledger()
    ledger.open(0)
    ledger.move(0, State.parked)
    with pytest.raises(LedgerError, match="1 prompts parked in the ledger, 0 in the buffer"):
        ledger.check(parked=0, ready=0)


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 3))
def test_slots_are_shared_out_evenly_and_in_full(num_slots, num_engines, lookahead):
    """Fails when the share of an engine is rounded, or one without slots is chosen."""
    slots = Slots(num_engines=num_engines, num_slots=num_slots, lookahead=lookahead)
    shares = [slots.slots(engine) for engine in range(num_engines)]
    assert sum(shares) == num_slots
    assert max(shares) - min(shares) <= 1
    submitted = 0
    while (chosen := slots.choose([None], None)) is not None:
        slots.put(chosen[0], count=1, work=13.0)
        submitted += 1
    busy = sum(share > 0 for share in shares)
    assert submitted == num_slots + lookahead * busy
    assert all(slots.in_flight(e) in (0, shares[e] + lookahead) for e in range(num_engines))


def test_a_free_slot_comes_first_then_the_siblings_then_the_least_work():
    """Fails when a sample queues behind its siblings although another engine has a free slot, or
    siblings are kept together beyond the room of their engine.
    """
    slots = Slots(num_engines=2, num_slots=4, lookahead=1)
    assert slots.choose([None], None) == (0, 1)
    slots.put(0, count=1, work=10.0)
    assert slots.choose([None] * 3, None) == (1, 2)
    slots.put(1, count=1, work=1.0)
    assert slots.choose([None] * 3, 0) == (0, 1)
    slots.put(0, count=1, work=4.0)
    assert slots.choose([None] * 3, 0) == (1, 1)
    slots.put(1, count=1, work=1.0)
    slots.withdraw(1)
    assert slots.choose([None] * 3, 1) == (0, 1)
    slots.put(0, count=1, work=1.0)
    assert slots.choose([None], 0) is None
    slots.free(0, count=2, work=14.0)
    assert slots.in_flight(0) == 1
    assert slots.choose([None] * 3, None) == (0, 1)


def test_a_run_of_siblings_ends_where_another_engine_was_home_to_one():
    """Fails when a sample does not go back to where its state may be, or a home without room cuts
    the run short.
    """
    slots = Slots(num_engines=2, num_slots=16, lookahead=1)
    assert slots.choose([0, 0, 1, 0], None) == (0, 2)
    assert slots.choose([0, None, 0, 1], 1) == (0, 3)
    assert slots.choose([None, 1], 0) == (0, 1)
    slots.withdraw(1)
    assert slots.choose([0, 0, 1, 0], None) == (0, 4)
    assert slots.choose([1, 0], None) == (0, 2)


def open_group(*num_tokens: int | None, size: int = 4) -> OpenGroup:
    """Prompt 1 of two tokens; samples unfinished with so many tokens, finished with none more."""
    group = OpenGroup(Prompt(id=1, token_ids=(1, 2), text="", answer="", source=""), size)
    for index, count in enumerate(num_tokens):
        if count is None:
            part = completion(index, start=0, num_tokens=3, version=0)
            group.extend(replace(part, finish_reason="stop"))
        elif count:
            group.extend(completion(index, start=0, num_tokens=count, version=0))
    group.begin_step()
    return group


def test_what_is_sent_waits_no_more_and_says_what_it_has_to_compute():
    """Fails when a finished sample is sent, one is sent twice, or the response so far is not among
    the tokens to prefill.
    """
    group = open_group(5, None, 0, 7)
    assert group.send(2, engine=3, expected_tokens=10.0) == ([0, 2], 2 + 5 + 10.0 + 2 + 10.0)
    assert (group.waiting, group.latest, group.homes) == ([3], 3, [3, None, 3, None])
    assert group.send(1, engine=0, expected_tokens=1.0) == ([3], 2 + 7 + 1.0)
    assert group.work == [17.0, 0.0, 12.0, 10.0]
    group.begin_step()
    assert (group.waiting, group.latest, group.homes) == ([0, 2, 3], None, [3, None, 3, 0])


@given(st.integers(1, 5), st.lists(st.integers(1, 9), max_size=3))
def test_siblings_are_the_requests_of_their_samples(count, lengths):
    """Fails when a sample goes on elsewhere than where it ends, gets another budget, or the seed of
    another sample or part.
    """
    parts = [tuple((n,) * n for n in lengths[: index % 4]) for index in range(count)]
    siblings = Siblings(7, (1, 2, 3), [*range(count)], parts, 40, 11)
    for index, request in enumerate(siblings.requests()):
        assert request.sample_id == SampleId(7, index)
        assert request.token_ids == [1, 2, 3, *chain.from_iterable(parts[index])]
        assert request.start + request.max_tokens == 40
        assert request.num_tokens == len(request.token_ids)
        assert request.seed == request_seed(11, request.sample_id, len(parts[index]))


def test_ticks_that_were_launched_and_never_computed_give_their_requests_back():
    """Fails when an abort forgets what is on its way to an engine."""
    engines = FakeEngines(constant(5), num_engines=2, budget=8, computes_on=False)
    engines.launch(0, [Siblings(0, (1,), [0], [()], 8, 0)], slots=1, max_steps=4)
    engines.launch(1, [Siblings(1, (1,), [0, 1], [(), ()], 8, 0)], slots=1, max_steps=4)
    assert [engine for engine, _ in engines.wait(1.0)] == [0]
    completions, stalled = engines.abort(1.0)
    assert stalled == []
    lengths = {c.sample_id: len(c.token_ids) for c in completions}
    assert lengths == {SampleId(0, 0): 4, SampleId(1, 0): 0, SampleId(1, 1): 0}


def test_step_statistics_count_what_the_engines_did():
    """Fails when tokens of the abort, resumed samples or truncated ones are left out."""
    run = Run(Setup(num_groups=2, alpha=2.0, budget=6, law=lambda s: 3 if s.prompt_id % 2 else 9))
    generated = 0
    for _ in range(3):
        resumable = sum(sample.num_tokens > 0 and not sample.is_finished for sample in run.alive)
        collection = run.step()
        read = collection.stats.metrics(num_needed=4).read()
        samples = [s for scored in collection.groups for s in scored.group.samples]
        assert collection.stats.generated_tokens == run.fakes.generated - generated
        generated = run.fakes.generated
        assert read["rollout/resumed_samples"] <= resumable
        truncated = [sample.num_tokens == 6 for sample in samples]
        assert read["rollout/truncated_frac"] == sum(truncated) / len(truncated)
        assert read["rollout/response_tokens_max"] == max(s.num_tokens for s in samples)
        assert read["rollout/over_sampling_factor"] == 2.0
        assert read["rollout/parked_tokens"] == run.collector.buffer.open_tokens
        assert 0 <= read["rollout/occupancy"] <= 1


def tick(*, engine_steps: int, slot_steps: int, elapsed_s: float) -> Tick:
    return Tick(
        finished=(),
        num_running=0,
        num_queued=0,
        engine_steps=engine_steps,
        slot_steps=slot_steps,
        context_token_steps=0,
        generated_tokens=slot_steps,
        prefilled_tokens=0,
        elapsed_s=elapsed_s,
    )


def test_occupancy_is_slot_time_over_the_time_of_the_engine_that_worked_longest():
    """Two engines with 8 slots each: one full for 6 s and half full, in slow steps, for 4 s; the
    other full for 2 s and then out of work. 6·8 + 4·4 + 2·8 = 80 of 16·10 slot-seconds. Fails when
    engine steps are weighted alike however long they took (0.94), or the time in which an engine
    had nothing to do is left out (0.83).
    """
    stats = StepStats(num_slots=16, policy_version=0, clock=lambda: 0.0)
    stats.add_tick(tick(engine_steps=60, slot_steps=480, elapsed_s=6.0), engine=0)
    stats.add_tick(tick(engine_steps=20, slot_steps=160, elapsed_s=2.0), engine=1)
    stats.add_tick(tick(engine_steps=10, slot_steps=40, elapsed_s=4.0), engine=0)
    stats.add_tick(tick(engine_steps=0, slot_steps=0, elapsed_s=0.0), engine=1)
    assert stats.in_flight_mean == pytest.approx(8.0)
    stats.time_s = 10.0
    assert stats.metrics(num_needed=8).read()["rollout/occupancy"] == pytest.approx(0.5)


def test_a_step_without_engine_work_has_no_requests_in_flight():
    """Fails when a step that only takes ready groups divides by its engines' time."""
    assert StepStats(num_slots=4, policy_version=0, clock=lambda: 0.0).in_flight_mean == 0.0


def completion(index: int, *, start: int, num_tokens: int, version: int) -> Completion:
    return Completion(
        sample_id=SampleId(1, index),
        start=start,
        policy_version=version,
        context_version=version,
        token_ids=(7,) * num_tokens,
        logprobs=(-1.0,) * num_tokens,
        finish_reason=None,
    )


def test_a_group_is_scored_when_every_sample_has_a_score_and_none_before():
    """Fails when a score that comes twice counts twice, a failed one is forgotten, or rewards are
    in the order of their arrival.
    """
    group = open_group(None, None, None, size=3)
    right, wrong = (Score(SampleId(1, i), float(i), "scored") for i in (0, 2))
    group.note(wrong)
    group.note(wrong)
    group.note(right)
    assert not group.is_scored
    failed = Score(SampleId(1, 1), 7.0, "timeout")
    group.note(failed)
    assert group.is_scored
    assert group.failure == failed
    assert group.scored().rewards == (0.0, 7.0, 2.0)


def test_lengths_of_groups_are_those_of_their_samples():
    """Fails when a finished sample counts as unfinished, or a group's samples are left out."""
    groups = [open_group(5, None, 0), open_group(None, size=1)]
    lengths, is_finished = lengths_of(groups)
    assert lengths.tolist() == [5, 3, 0, 0, 3]
    assert is_finished.tolist() == [False, True, False, False, True]
    assert [array.size for array in lengths_of([])] == [0, 0]


def test_fresh_samples_are_the_shortest_of_those_with_tokens_of_this_version():
    """Of equal ones the first. Fails when a sample without tokens or one of an earlier version is
    taken, or a group's tokens are counted wrongly as it grows.
    """
    buffer = Buffer()
    group = buffer.open(Prompt(id=1, token_ids=(1, 2), text="", answer="", source=""), 6)
    for index, (num_tokens, version) in enumerate([(5, 3), (2, 2), (4, 3), (3, 3), (3, 3)]):
        buffer.extend(group, completion(index, start=0, num_tokens=num_tokens, version=version))
    assert [s.index for s in buffer.fresh_samples(3, limit=3)] == [3, 4, 2]
    assert [s.index for s in buffer.fresh_samples(3, limit=9)] == [3, 4, 2, 0]
    assert buffer.open_tokens == 17
