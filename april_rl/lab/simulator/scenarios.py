"""The scenario that a configuration describes."""

from __future__ import annotations

from april_rl.config import TrainConfig
from april_rl.config.choices import OnStale
from april_rl.lab.simulator.engine_cost import Cost
from april_rl.lab.simulator.length_distributions import LengthDistribution
from april_rl.lab.simulator.simulation import Scenario
from april_rl.start.planning.sizes import tick_steps

_LARGEST_FRAC = 0.95  # share of groups without signal: above it, the filter hardly finds any others


def scenario_of(
    config: TrainConfig,
    *,
    num_engines: int,
    cost: Cost,
    length_of: LengthDistribution,
    keeps_parked: bool,
    prompt_tokens: float = 1.0,
    no_signal_frac: float = 0.0,
) -> Scenario:
    """Return the run as a scenario to simulate. The arguments are what a configuration does not
    contain: the number of engines, their cost, the lengths, whether parked samples keep their KV
    cache, the mean tokens of a prompt and the share of groups whose rewards are all equal.
    """
    rollout = config.rollout
    return Scenario(
        cost=cost,
        length_of=length_of,
        num_groups=config.trainer.num_groups,
        group_size=rollout.group_size,
        max_response_tokens=rollout.max_response_tokens,
        prompt_tokens=max(1, round(prompt_tokens)),
        num_engines=num_engines,
        tick_steps=tick_steps(config, num_engines=num_engines),
        max_batched_tokens=config.engine.max_batched_tokens,
        max_staleness=rollout.max_staleness,
        finish_stale=rollout.on_stale is OnStale.finish,
        keeps_parked=keeps_parked,
        no_signal_frac=min(no_signal_frac, _LARGEST_FRAC),
        is_filtered=config.algorithm.dynamic_sampling,
        seed=config.seed,
    )
