"""The simulation runs the real collector, and its figures have the stated meaning."""

from dataclasses import replace
from statistics import fmean

import pytest
from shapes import shape_by_name

from april_rl.lab.simulator.engine_cost import EngineCost
from april_rl.lab.simulator.gpu_kinds import GPU_KINDS
from april_rl.lab.simulator.length_distributions import Lognormal
from april_rl.lab.simulator.length_statistics import dispersion
from april_rl.lab.simulator.model_cost import ModelCost
from april_rl.lab.simulator.outcome import Outcome
from april_rl.lab.simulator.simulation import Scenario, simulate
from april_rl.training.rollout.collector import Collection

COST = EngineCost(step_s=5e-3, sample_s=2e-5, context_token_s=6e-8, prefill_token_s=2e-5)
TAIL = Lognormal(median_tokens=150, sigma=1.0, correlation=0.3)
SMALL = Scenario(
    cost=COST,
    length_of=TAIL,
    num_groups=8,
    group_size=4,
    max_response_tokens=1500,
    prompt_tokens=16,
)


def run(
    scenario: Scenario,
    factor: float,
    *,
    refill: bool,
    steps: int = 10,
    seen: list[Collection] | None = None,
) -> Outcome:
    return simulate(
        scenario,
        over_sampling_factor=factor,
        refill=refill,
        num_steps=steps,
        warmup_steps=5,
        on_step=lambda _, collection: None if seen is None else seen.append(collection),
    )


def test_over_sampling_gains_with_a_long_tail_and_not_without():
    """Fails when only the samples in flight take time, or parked tokens are lost."""
    tail = [run(SMALL, factor, refill=r) for factor, r in ((1, False), (2, False), (2, True))]
    gains = [o.trained_samples_per_s / tail[0].trained_samples_per_s for o in tail]
    assert gains[1] > 1.5
    assert gains[2] > 1.5
    even = replace(SMALL, length_of=lambda _: 256, tick_steps=1)
    base, shot = run(even, 1, refill=False), run(even, 2, refill=False)
    # 64 samples at once for 256 steps instead of twice 32: that saves reading the weights.
    saved_s = COST.step_s * 256 / 2
    assert shot.step_s == pytest.approx(base.step_s - saved_s, rel=0.02)
    free = replace(even, cost=COST._replace(step_s=0.0))
    gain = run(free, 2, refill=False).trained_samples_per_s
    assert gain == pytest.approx(run(free, 1, refill=False).trained_samples_per_s, rel=0.02)


def test_engines_work_in_parallel():
    """Two engines with half of the samples each take as long as one engine with half of them. Fails
    when the ticks of two engines come one after the other.
    """
    even = replace(SMALL, length_of=lambda _: 100, group_size=1, num_groups=8)
    two = run(replace(even, num_engines=2), 1, refill=False)
    half = run(replace(even, num_groups=4), 1, refill=False)
    assert two.step_s == pytest.approx(half.step_s)


def test_a_synchronous_step_waits_for_a_slow_reward_only_at_its_end():
    """Fails when the delay is added for every sample, or never."""
    at_once = run(SMALL, 1, refill=False)
    slow = run(replace(SMALL, score_s=0.5), 1, refill=False)
    assert slow.step_s == pytest.approx(at_once.step_s + 0.5)
    busy_s = at_once.occupancy * at_once.rollout_s
    assert slow.occupancy == pytest.approx(busy_s / slow.rollout_s), "slots wait with the step"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_groups": 0}, "num_groups must be >= 1, got 0"),
        ({"no_signal_frac": 1.0}, r"no_signal_frac must be in \[0, 1\), got 1"),
        ({"rest_s": -1.0}, "must be >= 0"),
        ({"cost": EngineCost(0.0, 0.0, 0.0, 0.0)}, "all zero"),
    ],
)
def test_an_impossible_scenario_is_refused(change, message):
    """Fails when a check is missing: the simulation would loop or divide by zero."""
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


def test_batches_of_a_run_are_nearly_like_random_draws():
    """Measured by the deviation of their mean lengths, where 1 is a random draw. It is above 2 when
    a step trains the oldest ready groups and as many groups are open as the staleness cap allows.
    """
    scenario = Scenario(
        cost=ModelCost(shape=shape_by_name("4B"), rates=GPU_KINDS["h100"].rates()),
        length_of=Lognormal(median_tokens=64, sigma=1.0, correlation=0.6),
        num_groups=16,
        group_size=8,
        max_response_tokens=640,
        prompt_tokens=64,
        max_staleness=5,
    )
    batches: list[list[float]] = []
    simulate(
        scenario,
        over_sampling_factor=2.0,
        refill=True,
        num_steps=80,
        warmup_steps=20,
        on_step=lambda _, collected: batches.append(lengths_of(collected)),
    )
    found = dispersion(batches[20:])
    assert found is not None
    assert found < 1.3


def lengths_of(collection: Collection) -> list[float]:
    return [fmean(s.num_tokens for s in scored.group.samples) for scored in collection.groups]
