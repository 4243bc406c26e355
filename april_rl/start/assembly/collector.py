"""Build the collector from a checked configuration: samples in flight and the rules of a step."""

from __future__ import annotations

from dataclasses import replace

from april_rl.config import TrainConfig
from april_rl.config.choices import OnRestart, OnStale
from april_rl.start.assembly.own_algorithm import load_group_filter
from april_rl.task.data.stream import MixedStream, PromptStream
from april_rl.training.rollout.collector import Collector
from april_rl.training.rollout.dispatch import RequestRules
from april_rl.training.rollout.ports import Engines, Outside
from april_rl.training.rollout.step import StepRules
from april_rl.training.rollout.stop_rule import Filter
from april_rl.types import ScoredGroup

# For each group that it trains, a step may lose this many that have no signal or are dropped.
_REJECTED_PER_GROUP = 20
_ABORT_TIMEOUT_S = 60.0  # an engine that has not returned its samples by then counts as hung


def build_collector(
    config: TrainConfig,
    engines: Engines,
    outside: Outside,
    *,
    prompts: PromptStream | MixedStream,
) -> Collector:
    """Build the collector from a checked configuration."""
    rollout = config.rollout
    return Collector(
        engines,
        outside,
        prompts,
        StepRules(
            num_groups=config.trainer.num_groups,
            group_size=rollout.group_size,
            refill=rollout.refill,
            max_staleness=rollout.max_staleness,
            finish_stale=rollout.on_stale is OnStale.finish,
            max_rejected_groups=_REJECTED_PER_GROUP * config.trainer.num_groups,
            group_filter=_filter(config, prompts),
            requests=RequestRules(
                tick_steps=rollout.steps_per_tick,
                max_response_tokens=rollout.max_response_tokens,
                seed=config.seed,
            ),
            abort_timeout_s=_ABORT_TIMEOUT_S,
            tick_timeout_s=config.runtime.stall_timeout_s,
            deterministic=config.deterministic,
        ),
        over_sampling_factor=rollout.over_sampling_factor,
        restarts_episodes=config.environment.on_restart is OnRestart.again,
    )


def _filter(config: TrainConfig, prompts: PromptStream | MixedStream) -> Filter:
    """Return the group filter, which also passes rewards to a prompt sampler that reads them."""
    chosen = Filter()
    if (own := load_group_filter(config.algorithm)) is not None:
        chosen = Filter(
            keep=own,
            cause=f"by algorithm.group_filter={config.algorithm.group_filter}",
            advice="see whether it returns True for a group that you would train, and what the "
            "reward gives (python -m april_rl data shows it for right and wrong answers)",
        )
    elif config.algorithm.dynamic_sampling:
        chosen = Filter(keep=lambda scored: scored.has_signal)
    if not prompts.learns:
        return chosen

    def learn(scored: ScoredGroup) -> bool:
        prompts.learn(scored.group.prompt, scored.rewards)
        return chosen.keep(scored)

    return replace(chosen, keep=learn)
