"""The simulated engine counts like a real one, and lengths follow their distributions."""

import numpy as np
import pytest
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from april_rl.lab.simulator.engine_cost import EngineCost, EngineWork
from april_rl.lab.simulator.length_distributions import (
    LengthDistribution,
    Lognormal,
    Recorded,
    capped_mean,
    median_for,
)
from april_rl.lab.simulator.simulated_engine import SimulatedEngine
from april_rl.lab.simulator.simulation import Scenario, simulate
from april_rl.lab.simulator.world import DelayedScores, NumberedPrompts, VirtualClock
from april_rl.training.rollout.collector import Collector
from april_rl.training.rollout.dispatch import RequestRules
from april_rl.training.rollout.in_process import SerialEngines, SingleEngine
from april_rl.training.rollout.requests import Request
from april_rl.training.rollout.step import StepRules
from april_rl.types import SampleId

COST = EngineCost(step_s=5e-3, sample_s=2e-5, context_token_s=6e-8, prefill_token_s=2e-5)
quick = settings(max_examples=40, deadline=None)


def by_index(lengths: list[int]) -> LengthDistribution:
    """Return the length of a sample from the number of its prompt."""
    return lambda sample_id: lengths[sample_id.prompt_id % len(lengths)]


@quick
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=12),
    prompt_tokens=st.integers(1, 40),
    tick_steps=st.integers(1, 50),
)
def test_a_synchronous_step_takes_what_the_closed_form_says(lengths, prompt_tokens, tick_steps):
    """Σ over samples of P·r + r(r - 1)/2 tokens read, Σ r slots, max r steps. Fails when skipped
    steps count with the context at their beginning, or a prefill costs an extra step.
    """
    scenario = Scenario(
        cost=COST,
        length_of=by_index(lengths),
        num_groups=len(lengths),
        group_size=1,
        max_response_tokens=300,
        prompt_tokens=prompt_tokens,
        tick_steps=tick_steps,
        max_batched_tokens=10**6,
    )
    outcome = simulate(
        scenario, over_sampling_factor=1.0, refill=False, num_steps=1, warmup_steps=0
    )
    context = sum(prompt_tokens * r + r * (r - 1) // 2 for r in lengths)
    expected_s = COST.seconds(
        EngineWork(max(lengths), sum(lengths), context, prompt_tokens * len(lengths))
    )
    assert outcome.rollout_s == pytest.approx(expected_s)
    assert outcome.generated_tokens == sum(lengths)
    assert outcome.peak_kv_tokens >= max(lengths) + prompt_tokens


@quick
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=20),
    slots=st.integers(1, 8),
    max_batched_tokens=st.integers(8, 64),
    keeps=st.booleans(),
)
def test_skipping_from_event_to_event_counts_what_single_steps_count(
    lengths, slots, max_batched_tokens, keeps
):
    """Even across an abort. Fails when a slot is refilled only at the end of a tick, or a prefill
    of several parts is skipped.
    """

    def finish(tick_steps: int) -> tuple[object, ...]:
        engine = SimulatedEngine(
            length_of=by_index(lengths),
            cost=COST,
            keeps_parked=keeps,
            max_batched_tokens=max_batched_tokens,
        )
        requests = [request(i) for i in range(len(lengths))]
        totals = np.zeros(5)
        finished: list[tuple[SampleId, int]] = []
        for part in range(2):
            for _ in range(60 // tick_steps if part == 0 else 3000 // tick_steps):
                tick = engine.advance(requests, slots=slots, max_steps=tick_steps)
                requests = []
                totals += (
                    tick.engine_steps,
                    tick.slot_steps,
                    tick.context_token_steps,
                    tick.prefilled_tokens,
                    tick.elapsed_s,
                )
                finished += [(c.sample_id, c.start + len(c.token_ids)) for c in tick.finished]
            requests = [
                request(c.sample_id.prompt_id, start=c.start + len(c.token_ids))
                for c in engine.abort()
            ]
        assert {who.prompt_id: n for who, n in finished} == dict(enumerate(lengths))
        return (*totals[:4], round(totals[4], 9), engine.peak_kv_tokens, tuple(finished))

    assert finish(1) == finish(60)


def request(prompt_id: int, *, start: int = 0) -> Request:
    """Return a request for sample 0 of a prompt of twenty tokens, with a budget of 100."""
    return Request(
        sample_id=SampleId(prompt_id, 0),
        prompt_token_ids=(0,) * 20,
        parts=((0,) * start,),
        start=start,
        max_tokens=100 - start,
        seed=0,
    )


def test_a_long_prefill_shares_its_steps_with_the_samples_that_decode():
    """With eleven tokens per step, one of them for the other sample, forty tokens take four steps,
    and the fourth samples a token. Fails when decoding samples wait for a prefill, or the prefill
    waits for them.
    """
    engine = SimulatedEngine(
        length_of=by_index([12, 24]), cost=COST, keeps_parked=False, max_batched_tokens=11
    )
    first = engine.advance([request(0)], slots=2, max_steps=2)
    assert (first.prefilled_tokens, first.generated_tokens) == (20, 1)
    second = engine.advance([request(1, start=20)], slots=2, max_steps=4)
    assert (second.prefilled_tokens, second.generated_tokens) == (40, 5)
    assert (second.slot_steps, second.context_token_steps) == (8, 4 * 61 + 6)
    third = engine.advance([], slots=2, max_steps=3)
    assert [(c.sample_id.prompt_id, len(c.token_ids)) for c in third.finished] == [(1, 4)]
    assert (third.generated_tokens, third.prefilled_tokens) == (6, 0)


def test_samples_that_wait_for_their_prefill_are_not_part_of_a_step():
    """Three prompts of twenty tokens at twenty tokens per step: the steps have one, two, three and
    three samples. Fails when a sample costs time before its prefill begins, which it does not in
    vLLM.
    """
    engine = SimulatedEngine(
        length_of=by_index([9]), cost=COST, keeps_parked=False, max_batched_tokens=20
    )
    tick = engine.advance([request(i) for i in range(3)], slots=3, max_steps=4)
    assert (tick.prefilled_tokens, tick.generated_tokens) == (60, 7)
    assert tick.slot_steps == 1 + 2 + 3 + 3
    assert tick.context_token_steps == 20 + (21 + 20) + (22 + 20 + 20) + (23 + 21 + 20)


def test_the_collector_does_the_same_on_simulated_and_on_fake_engines():
    """The groups have the same versions, token by token. Fails when a kept sample waits one step
    before it continues, or a finished one leaves its slot one step late.
    """

    def versions(engine: SingleEngine) -> list[object]:
        clock = VirtualClock()
        collector = Collector(
            SerialEngines([engine]),
            DelayedScores(no_signal_frac=0.0, score_s=0.0, seed=0, clock=clock),
            NumberedPrompts(1),
            StepRules(
                num_groups=3,
                group_size=2,
                refill=True,
                max_staleness=5,
                finish_stale=True,
                max_rejected_groups=0,
                abort_timeout_s=1.0,
                tick_timeout_s=1.0,
                deterministic=False,
                requests=RequestRules(tick_steps=4, max_response_tokens=60, seed=0),
            ),
            over_sampling_factor=2.0,
            clock=iter(range(10**9)).__next__,
        )
        found: list[object] = []
        for version in range(8):
            if isinstance(engine, FakeEngine):
                engine.policy_version = version
            else:
                assert isinstance(engine, SimulatedEngine)
                engine.set_version(version)
            groups = collector.collect(version).groups
            found += [(s.id, s.policy_versions) for g in groups for s in g.group.samples]
        return found

    length_of = Lognormal(median_tokens=15, sigma=0.8)
    simulated = SimulatedEngine(
        length_of=length_of, cost=COST, keeps_parked=True, max_batched_tokens=10**6
    )
    fake = _LooseFake(length_of=length_of, budget=60, keeps=True)
    assert versions(simulated) == versions(fake)


class _LooseFake(FakeEngine):
    """The fake engine, for prompts with any tokens."""

    def _check(self, request: Request) -> None:
        assert request.start + request.max_tokens == self.budget


@quick
@given(st.floats(20, 2000), st.floats(0, 1.5))
def test_the_mean_of_capped_lengths_is_the_requested_one(mean_tokens, sigma):
    """Fails when the cap is left out of the formula."""
    median = median_for(mean_tokens, sigma=sigma, cap=2500)
    assert capped_mean(median, sigma, 2500) == pytest.approx(mean_tokens, rel=1e-6)


@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_drawn_lengths_follow_their_distribution(correlation):
    """Checks the mean under the cap, the deviation, and the correlation within groups. Fails when
    samples of a group share their whole deviation, or the shared part is added to their own.
    """
    length_of = Lognormal(median_tokens=200, sigma=0.8, correlation=correlation, seed=3)
    drawn = np.array([[length_of(SampleId(i, j)) for j in range(2)] for i in range(4000)])
    logs = np.log(drawn)
    assert np.minimum(drawn, 900).mean() == pytest.approx(capped_mean(200, 0.8, 900), rel=0.03)
    assert logs.std() == pytest.approx(0.8, rel=0.03)
    assert np.corrcoef(logs.T)[0, 1] == pytest.approx(correlation, abs=0.05)


def test_recorded_groups_are_drawn_as_a_whole():
    length_of = Recorded(groups=((1, 2), (10, 20)), seed=0)
    pairs = {(length_of(SampleId(i, 0)), length_of(SampleId(i, 1))) for i in range(50)}
    assert pairs == {(1, 2), (10, 20)}
    assert {length_of(SampleId(i, 5)) for i in range(50)} == {1, 2, 10, 20}
