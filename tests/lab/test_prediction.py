"""Predictions from the lengths of a run, by a scaled-down simulation of it."""

from dataclasses import replace
from statistics import fmean

import pytest

from april_rl.lab.simulator.engine_cost import EngineCost
from april_rl.lab.simulator.length_distributions import Lognormal, Recorded
from april_rl.lab.simulator.outcome import Outcome
from april_rl.lab.simulator.scaled_down import scale_down
from april_rl.lab.simulator.simulation import Scenario, simulate
from april_rl.types import SampleId

COST = EngineCost(step_s=2e-3, sample_s=2e-5, context_token_s=1e-8, prefill_token_s=3e-5)
LENGTH_OF = Lognormal(median_tokens=1000, sigma=0.6, correlation=0.3)
LONG = Scenario(
    cost=COST,
    length_of=LENGTH_OF,
    num_groups=12,
    group_size=4,
    max_response_tokens=8192,
    prompt_tokens=200,
    tick_steps=16,
)
SHORT = replace(LONG, length_of=Lognormal(median_tokens=40, sigma=0.6), max_response_tokens=200)


def lengths_of(scenario: Scenario, *, num_groups: int = 400) -> tuple[tuple[int, ...], ...]:
    limit = scenario.max_response_tokens
    return tuple(
        tuple(min(limit, scenario.length_of(SampleId(i, k))) for k in range(scenario.group_size))
        for i in range(num_groups)
    )


def record(scenario: Scenario, *, num_groups: int = 400, seed: int = 0) -> Scenario:
    groups = lengths_of(scenario, num_groups=num_groups)
    return replace(scenario, seed=seed, length_of=Recorded(groups=groups, seed=seed))


def play(scenario: Scenario, factor: float, *, num_steps: int, refill: bool = True) -> Outcome:
    return simulate(
        scenario, over_sampling_factor=factor, refill=refill, num_steps=num_steps, warmup_steps=12
    )


# Scaled-down scenarios.


@pytest.mark.parametrize(
    "scenario",
    [LONG, replace(LONG, keeps_parked=True, num_engines=2), replace(LONG, num_engines=3)],
    ids=["long", "kept", "large"],
)
def test_a_scaled_down_scenario_takes_the_same_time(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Throughput agrees within 6 %, the off-policy share within 0.04, the KV cache within 25 % (a
    peak, here of fewer samples), with steps that cost a fraction of the work. Fails when a term of
    the cost is not scaled.
    """
    if scenario.num_engines == 3:
        monkeypatch.setattr("april_rl.lab.simulator.scaled_down._MAX_SAMPLES", 32)
        monkeypatch.setattr("april_rl.lab.simulator.scaled_down._MAX_ENGINES", 1)
    small = scale_down(record(scenario))
    real = play(scenario, 1.5, num_steps=60)
    found = play(small, 1.5, num_steps=60)
    assert found.trained_samples_per_s == pytest.approx(real.trained_samples_per_s, rel=0.06)
    assert found.generated_tokens_per_s == pytest.approx(real.generated_tokens_per_s, rel=0.06)
    assert found.off_policy_token_frac == pytest.approx(real.off_policy_token_frac, abs=0.04)
    assert found.peak_kv_tokens == pytest.approx(real.peak_kv_tokens, rel=0.25)
    assert small.scale.tokens * small.scale.groups > 10


def test_a_small_scenario_is_not_scaled_down() -> None:
    """Fails when anything except the lengths changes although nothing is large."""
    assert replace(scale_down(record(SHORT)), length_of=SHORT.length_of) == SHORT


def test_the_work_of_a_prediction_is_bounded() -> None:
    huge = replace(LONG, num_groups=4096, group_size=16, num_engines=512, max_response_tokens=32768)
    small = scale_down(record(huge, num_groups=100))
    assert small.num_groups * small.group_size <= 1024
    assert small.num_engines <= 8
    assert fmean(n for group in lengths_of(small) for n in group) < 100


# Predictions.
