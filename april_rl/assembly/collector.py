"""Build the collector from a checked configuration: samples in flight and the rules of a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from april_rl.config import TrainConfig
from april_rl.config.choices import OnStale, Resume
from april_rl.rollout.collector import Collector
from april_rl.rollout.dispatch import RequestRules, auto_tick_steps
from april_rl.rollout.over_sampling import FixedFactor, OverSampling
from april_rl.rollout.ports import Engines, PromptSource, Scorer
from april_rl.rollout.step import StepRules
from april_rl.simulator.engine_cost import EngineCost
from april_rl.simulator.length_distributions import LengthDistribution, Lognormal
from april_rl.simulator.simulation import Scenario
from april_rl.tuning.auto_factor import AutoFactor, Budgets, largest_factor
from april_rl.tuning.process import SimulationProcess
from april_rl.types import ScoredGroup

# Rejected groups allowed in a step, per group it needs, when rollout.max_rejected_groups is 0.
_REJECTED_PER_GROUP = 20


def num_slots(config: TrainConfig) -> int:
    """Return the samples in flight over all engines, round(α·N·G); with `auto`, the largest
    possible.
    """
    rollout = config.rollout
    factor = rollout.over_sampling_factor
    most = largest_factor(rollout.max_staleness) if isinstance(factor, str) else factor
    return round(most * config.trainer.num_groups * rollout.group_size)


def tick_steps(config: TrainConfig, *, num_engines: int) -> int:
    """Return the number of engine steps in a tick."""
    rollout = config.rollout
    if not isinstance(rollout.tick_steps, str):
        return rollout.tick_steps
    return auto_tick_steps(num_engines=num_engines, max_response_tokens=rollout.max_response_tokens)


def build_collector(
    config: TrainConfig,
    engines: Engines,
    scorer: Scorer,
    *,
    prompts: PromptSource,
    kv_cache_tokens: int,
    stack: ExitStack,
) -> Collector:
    """Build the collector.

    `kv_cache_tokens` is the total over all engines; closing `stack` ends the simulation process of
    over_sampling_factor=auto.
    """
    rollout = config.rollout
    keep: Callable[[ScoredGroup], bool] = (
        (lambda scored: scored.has_signal)
        if config.algorithm.dynamic_sampling
        else (lambda scored: True)  # noqa: ARG005
    )
    return Collector(
        engines,
        scorer,
        prompts,
        StepRules(
            num_groups=config.trainer.num_groups,
            group_size=rollout.group_size,
            refill=rollout.refill,
            max_staleness=rollout.max_staleness,
            finish_stale=rollout.on_stale is OnStale.finish,
            max_rejected_groups=rollout.max_rejected_groups
            or _REJECTED_PER_GROUP * config.trainer.num_groups,
            requests=RequestRules(
                tick_steps=tick_steps(config, num_engines=engines.num_engines),
                max_response_tokens=rollout.max_response_tokens,
                seed=config.seed,
            ),
            abort_timeout_s=rollout.abort_timeout_s,
            tick_timeout_s=config.runtime.stall_timeout_s,
            deterministic=config.deterministic,
        ),
        over_sampling=_over_sampling(
            config,
            num_engines=engines.num_engines,
            kv_cache_tokens=kv_cache_tokens,
            stack=stack,
        ),
        keep=keep,
    )


def scenario_of(
    config: TrainConfig, *, num_engines: int, cost: EngineCost, length_of: LengthDistribution
) -> Scenario:
    """Return the run as a scenario to simulate, with the engine cost and length distribution
    given.
    """
    rollout = config.rollout
    return Scenario(
        cost=cost,
        length_of=length_of,
        num_groups=config.trainer.num_groups,
        group_size=rollout.group_size,
        max_response_tokens=rollout.max_response_tokens,
        num_engines=num_engines,
        tick_steps=tick_steps(config, num_engines=num_engines),
        max_batched_tokens=config.engine.max_batched_tokens,
        max_staleness=rollout.max_staleness,
        finish_stale=rollout.on_stale is OnStale.finish,
        keeps_parked=rollout.resume is Resume.keep,
        is_filtered=config.algorithm.dynamic_sampling,
        seed=config.seed,
    )


def _over_sampling(
    config: TrainConfig, *, num_engines: int, kv_cache_tokens: int, stack: ExitStack
) -> OverSampling:
    rollout = config.rollout
    if not isinstance(rollout.over_sampling_factor, str):
        return FixedFactor(rollout.over_sampling_factor)
    process = SimulationProcess()
    stack.callback(process.close)
    unknown = EngineCost(step_s=1.0, sample_s=0.0, context_token_s=0.0, prefill_token_s=0.0)
    return AutoFactor(
        scenario_of(
            config,
            num_engines=num_engines,
            cost=unknown,
            length_of=Lognormal(median_tokens=1.0, sigma=0.0),
        ),
        Budgets(max_off_policy_frac=rollout.max_off_policy_frac, kv_cache_tokens=kv_cache_tokens),
        refill=rollout.refill,
        submit=process.submit,
    )
