"""Make α = `auto` from a configuration."""

from __future__ import annotations

from contextlib import ExitStack

from april_rl.config import TrainConfig
from april_rl.lab.simulator.engine_cost import EngineCost
from april_rl.lab.simulator.length_distributions import Lognormal
from april_rl.lab.simulator.scenarios import scenario_of
from april_rl.lab.tuning.auto_factor import AutoFactor, Budgets
from april_rl.lab.tuning.process import SimulationProcess


def auto_factor(
    config: TrainConfig, *, num_engines: int, kv_cache_tokens: int, stack: ExitStack
) -> AutoFactor:
    """Return an over-sampling factor that is learned during the run.

    `kv_cache_tokens` is the total over all engines; closing `stack` ends the simulation process.
    """
    process = SimulationProcess()
    stack.callback(process.close)
    unknown = EngineCost(step_s=1.0, sample_s=0.0, context_token_s=0.0, prefill_token_s=0.0)
    return AutoFactor(
        scenario_of(
            config,
            num_engines=num_engines,
            cost=unknown,
            length_of=Lognormal(median_tokens=1.0, sigma=0.0),
            keeps_parked=config.rollout.resume.keeps_caches,
        ),
        Budgets(
            max_off_policy_frac=config.rollout.max_off_policy_frac,
            kv_cache_tokens=kv_cache_tokens / num_engines,
        ),
        refill=config.rollout.refill,
        submit=process.submit,
    )
