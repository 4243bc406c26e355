"""Ledger, slots, serial engines and step statistics, each by itself."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngines
from hypothesis import given
from hypothesis import strategies as st
from rollout_runs import Run, Setup, constant

from april_rl.rollout.buffer import Buffer
from april_rl.rollout.ledger import Ledger, LedgerError, State
from april_rl.rollout.slots import Slots
from april_rl.rollout.stats import StepStats
from april_rl.types import Completion, Prompt, Request, SampleId, Tick

FINAL = {State.trained, State.rejected, State.dropped}


def request(prompt_id: int, index: int, *, length: int = 3) -> Request:
    return Request(
        sample_id=SampleId(prompt_id, index),
        prompt_token_ids=(1,) * length,
        start=0,
        max_tokens=8,
        seed=0,
    )


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


def test_a_ledger_that_disagrees_with_the_buffer_says_so():
    ledger = Ledger()
    ledger.open(0)
    ledger.move(0, State.parked)
    with pytest.raises(LedgerError, match="1 prompts parked in the ledger, 0 in the buffer"):
        ledger.check(parked=0, ready=0)


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 3))
def test_slots_are_shared_out_evenly_and_in_full(num_slots, num_engines, lookahead):
    """Fails when the share of an engine is rounded, or one without slots is chosen."""
    slots = Slots(num_engines=num_engines, num_slots=num_slots, lookahead=lookahead, home={})
    shares = [slots.slots(engine) for engine in range(num_engines)]
    assert sum(shares) == num_slots
    assert max(shares) - min(shares) <= 1
    submitted = 0
    while slots.put(SampleId(submitted, 0), work=13.0) is not None:
        submitted += 1
    busy = sum(share > 0 for share in shares)
    assert submitted == num_slots + lookahead * busy
    assert all(slots.in_flight(e) in (0, shares[e] + lookahead) for e in range(num_engines))


def test_a_free_slot_comes_first_then_the_siblings_then_the_least_work():
    """Fails when a sample queues behind its siblings although another engine has a free slot."""
    slots = Slots(num_engines=2, num_slots=4, lookahead=1, home={})
    assert slots.put(SampleId(0, 0), work=10.0) == 0
    assert slots.put(SampleId(1, 0), work=1.0) == 1
    assert slots.put(SampleId(0, 1), work=4.0) == 0
    assert slots.put(SampleId(0, 2), work=1.0) == 1
    slots.withdraw(1)
    assert slots.put(SampleId(0, 3), work=1.0) == 0
    assert slots.put(SampleId(0, 4), work=1.0) is None
    assert slots.held_by({0}) == {SampleId(0, 0), SampleId(0, 1), SampleId(0, 3)}
    slots.free(SampleId(0, 0))
    slots.free(SampleId(0, 0))
    assert [slots.is_held(SampleId(0, index)) for index in (0, 1, 4)] == [False, True, False]
    assert slots.in_flight(0) == 2


def test_ticks_that_were_launched_and_never_computed_give_their_requests_back():
    """Fails when an abort forgets what is on its way to an engine."""
    engines = FakeEngines(constant(5), num_engines=2, budget=8, computes_on=False)
    engines.launch(0, [request(0, 0)], slots=1, max_steps=4)
    engines.launch(1, [request(1, 0), request(1, 1)], slots=1, max_steps=4)
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


def test_progress_is_the_latest_of_every_sample_whenever_it_is_asked_for():
    """Fails when what comes after the first question is not in the answer to the second."""
    stats = StepStats(num_slots=4, policy_version=0, clock=lambda: 0.0)
    stats.add_completion(completion(0, start=0, num_tokens=3, version=0), num_prompt_tokens=5)
    assert stats.progress == {SampleId(1, 0): (5, 3, False)}
    stats.add_completion(completion(0, start=3, num_tokens=4, version=0), num_prompt_tokens=5)
    stats.add_completion(completion(2, start=0, num_tokens=1, version=0), num_prompt_tokens=5)
    assert stats.progress == {SampleId(1, 0): (5, 7, False), SampleId(1, 2): (5, 1, False)}


def test_fresh_samples_are_the_shortest_of_those_with_tokens_of_this_version():
    """Of equal ones the first. Fails when a sample without tokens or one of an earlier version is
    taken, or a group's tokens are counted wrongly as it grows.
    """
    buffer = Buffer()
    group = buffer.open(Prompt(id=1, token_ids=(1, 2), text="", answer="", source=""), 6)
    for index, (num_tokens, version) in enumerate([(5, 3), (2, 2), (4, 3), (3, 3), (3, 3)]):
        part = completion(index, start=0, num_tokens=num_tokens, version=version)
        buffer.extend(group, group.samples[index].extended(part))
    assert [s.index for s in buffer.fresh_samples(3, limit=3)] == [3, 4, 2]
    assert [s.index for s in buffer.fresh_samples(3, limit=9)] == [3, 4, 2, 0]
    assert buffer.open_tokens == 17
