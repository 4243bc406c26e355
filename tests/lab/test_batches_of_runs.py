"""Batches of simulated runs are nearly like random draws from everything that is generated."""

import numpy as np
from shapes import shape_by_name

from april_rl.lab.simulator.gpu_kinds import GPU_KINDS
from april_rl.lab.simulator.length_distributions import Lognormal
from april_rl.lab.simulator.length_statistics import dispersion
from april_rl.lab.simulator.model_cost import ModelCost
from april_rl.lab.simulator.simulation import Scenario, simulate
from april_rl.types import ScoredGroup


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
        on_step=lambda _, collected: batches.append([*map(mean_length, collected.groups)]),
    )
    found = dispersion(batches[20:])
    assert found is not None
    assert found < 1.3


def mean_length(scored: ScoredGroup) -> float:
    return float(np.mean([sample.num_tokens for sample in scored.group.samples]))
