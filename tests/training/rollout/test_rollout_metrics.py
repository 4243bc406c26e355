"""Slots, fake engines and the metrics of a step, each tested on its own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from light_samples import make_tick
from rollout_runs import Run, Setup
from sent_samples import record

from april_rl.training.rollout.measures.rollout_metrics import rollout_metrics
from april_rl.training.rollout.record import Act, Returned, Sent
from april_rl.training.rollout.slots import Slots
from april_rl.types import SampleId


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 3))
def test_slots_are_divided_evenly_and_completely(num_slots, num_engines, queue_size):
    """Fails when the share of an engine is rounded, or one without slots is chosen."""
    slots = Slots(num_engines=num_engines, num_slots=num_slots, queue_size=queue_size)
    shares = [slots.slots(engine) for engine in range(num_engines)]
    assert sum(shares) == num_slots
    assert max(shares) - min(shares) <= 1
    submitted = 0
    while (engine := slots.choose(last_engine=None, siblings=None)) is not None:
        slots.add(engine, tokens=13.0)
        submitted += 1
    busy = sum(share > 0 for share in shares)
    assert submitted == num_slots + queue_size * busy
    assert all(slots.in_flight(e) in (0, shares[e] + queue_size) for e in range(num_engines))


@pytest.mark.parametrize("turns", [0, 3])
def test_step_statistics_match_the_work_of_the_engines(turns):
    """Fails when tokens of the abort, finished samples, or resumed or truncated samples are left
    out.
    """
    run = Run(
        Setup(
            num_groups=2,
            alpha=2.0,
            budget=6,
            length_of=lambda s: 3 if s.prompt_id % 2 else 9,
            turns=turns,
        )
    )
    generated = finished = 0
    for _ in range(3):
        resumable = sum(sample.num_tokens > 0 and not sample.is_finished for sample in run.alive)
        collection = run.step()
        read = rollout_metrics(collection.record, num_needed=4).read() | collection.metrics.read()
        samples = [s for scored in collection.groups for s in scored.group.samples]
        assert collection.record.generated_tokens == run.fakes.generated - generated
        generated = run.fakes.generated
        assert collection.record.finished_samples == len(run.scorer.submitted) - finished
        finished = len(run.scorer.submitted)
        assert read["rollout/resumed_samples"] <= resumable
        truncated = [sample.num_tokens == 6 for sample in samples]
        assert read["rollout/truncated_frac"] == sum(truncated) / len(truncated)
        assert read["rollout/response_tokens_max"] == max(s.num_tokens for s in samples)
        assert read["rollout/over_sampling_factor"] == 2.0
        assert read["rollout/parked_tokens"] == run.buffer.open_tokens
        assert 0 <= read["rollout/occupancy"] <= 1


def test_the_expected_length_is_the_running_mean_of_all_finished_responses():
    """Fails when responses from an abort are left out, or only the last part of a
    response counts.
    """
    run, expected, in_abort = Run(Setup(alpha=2.5, num_engines=2, tick_steps=9)), 1.0, 0
    for _ in range(4):
        step = run.step().record
        lengths = [each.start + each.tokens for each in step.returned if each.is_finished]
        for length in lengths:
            expected += (length - expected) / 20
        in_abort += len(lengths) - sum(len(each.finished) for _, each in step.ticks)
        assert run.collector.save()["dispatch"]["expected_tokens"] == pytest.approx(expected)
    assert in_abort > 0


def test_occupancy_is_slot_time_over_the_time_of_the_rollout():
    """Two engines with 8 slots each: one is full for 6 s and half full, in slow steps, for 4 s; the
    other is full for 2 s and then out of work; then both wait 10 s for scores. 6·8 + 4·4 + 2·8 = 80
    of 16·20 slot-seconds. Fails when all engine steps have the same weight regardless of their
    duration, or the time in which one engine or all engines had nothing to do is left out (0.5).
    """
    step = record(num_slots=16)
    step.ticks = [
        (0, make_tick(engine_steps=60, slot_steps=480, elapsed_s=6.0)),
        (1, make_tick(engine_steps=20, slot_steps=160, elapsed_s=2.0)),
        (0, make_tick(engine_steps=10, slot_steps=40, elapsed_s=4.0)),
        (1, make_tick(engine_steps=0, slot_steps=0, elapsed_s=0.0)),
    ]
    step.time_s = 20.0
    assert step.in_flight_mean == pytest.approx(4.0)
    read = rollout_metrics(step, num_needed=8).read()
    assert (read["rollout/occupancy"], read["rollout/engine_s"]) == pytest.approx((0.25, 6.0))


def test_slots_that_are_empty_while_samples_act_are_a_share_of_all_slots():
    """Four slots, all full for 2 s. Then two samples act, and a sample from the queue takes one
    slot at once: one slot is empty for 3 s. At 5 s one sample continues while the other still acts:
    all slots are full until two samples finish at 8 s. Until 10 s, one slot is empty because of the
    other sample, the second because nothing is left. 1·3 + 1·2 = 5 of 40 slot-seconds. Fails when
    queued requests, finished samples or the ends of the step count wrongly.
    """
    step = record(num_slots=4)
    ids = [SampleId(0, index) for index in range(5)]
    step.sent = [Sent(0, 4, 0.0, ids), Sent(0, 4, 5.0, ids[:1])]
    back = Returned(
        ids[0],
        at_s=2.0,
        prompt_tokens=1,
        start=0,
        tokens=1,
        response_tokens=1,
        age=0,
        finish_reason="stop",
        is_resumed=False,
        is_kept=False,
        is_acting=True,
    )
    finished = back._replace(at_s=8.0, is_acting=False)
    step.returned = [back, back._replace(sample_id=ids[1])]
    step.returned += [finished._replace(sample_id=each) for each in ids[2:4]]
    step.acts = [Act(*ids[0], 2.0, 5.0, False), Act(*ids[1], 2.0, 10.0, False)]
    step.time_s = 10.0
    read = rollout_metrics(step, num_needed=4).read()
    assert read["environment/empty_slots_frac"] == pytest.approx(5 / 40)
    step.acts = []
    assert "environment/empty_slots_frac" not in rollout_metrics(step, num_needed=4).read()


def test_a_step_without_engine_work_has_no_requests_in_flight():
    """Fails with a division by zero when a step only takes ready groups and needs no time."""
    assert record(num_slots=4).in_flight_mean == 0.0
