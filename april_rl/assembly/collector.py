"""From a checked configuration to the collector: how many samples are in flight, and what a step
waits for.
"""

from __future__ import annotations

from collections.abc import Callable

from april_rl.config import TrainConfig
from april_rl.config.choices import OnStale
from april_rl.rollout.collector import Collector
from april_rl.rollout.dispatch import RequestRules, auto_tick_steps
from april_rl.rollout.over_sampling import FixedFactor, OverSampling
from april_rl.rollout.ports import Engines, PromptSource, Scorer
from april_rl.rollout.step import StepRules
from april_rl.tuning.auto_factor import AutoFactor, Budgets, largest_factor
from april_rl.tuning.forecast import Rules
from april_rl.types import ScoredGroup

# Rejected groups a step may see, as a multiple of the groups it needs, when the setting is 0.
_REJECTED_PER_GROUP = 20


def num_slots(config: TrainConfig) -> int:
    """C = round(α·N·G), over all engines; with `auto`, the most that will be asked for."""
    rollout = config.rollout
    factor = rollout.over_sampling_factor
    most = largest_factor(rollout.max_staleness) if isinstance(factor, str) else factor
    return round(most * config.trainer.num_groups * rollout.group_size)


def tick_steps(config: TrainConfig, *, num_engines: int) -> int:
    """Engine steps of a tick."""
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
) -> Collector:
    """The collector; `kv_cache_tokens` of all engines."""
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
            config, num_engines=engines.num_engines, kv_cache_tokens=kv_cache_tokens
        ),
        keep=keep,
    )


def _over_sampling(config: TrainConfig, *, num_engines: int, kv_cache_tokens: int) -> OverSampling:
    rollout = config.rollout
    if not isinstance(rollout.over_sampling_factor, str):
        return FixedFactor(rollout.over_sampling_factor)
    return AutoFactor(
        Rules(
            num_groups=config.trainer.num_groups,
            group_size=rollout.group_size,
            refill=rollout.refill,
            max_staleness=rollout.max_staleness,
            finish_stale=rollout.on_stale is OnStale.finish,
            tick_steps=tick_steps(config, num_engines=num_engines),
            num_engines=num_engines,
        ),
        Budgets(
            max_off_policy_frac=rollout.max_off_policy_frac,
            max_staleness=rollout.max_staleness,
            kv_cache_tokens=kv_cache_tokens,
        ),
        max_response_tokens=rollout.max_response_tokens,
    )
