"""Simulate a run of the production collector on simulated engines, to see the effect of
over-sampling, refill, filter, staleness cap and kept KV caches before a GPU is rented.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from april_rl.lab.simulator.engine_cost import Cost, EngineWork
from april_rl.lab.simulator.length_distributions import LengthDistribution
from april_rl.lab.simulator.outcome import Outcome, Scale
from april_rl.lab.simulator.simulated_engine import BLOCK_TOKENS, SimulatedEngine
from april_rl.lab.simulator.turns import Episodes, Turns
from april_rl.lab.simulator.world import (
    DelayedScores,
    NumberedPrompts,
    ParallelEngines,
    VirtualClock,
)
from april_rl.training.rollout.collector import Collection, Collector
from april_rl.training.rollout.dispatch import RequestRules
from april_rl.training.rollout.step import StepRules
from april_rl.training.rollout.stop_rule import Filter

_WITH_SIGNAL = Filter(keep=lambda scored: scored.has_signal)
_FOREVER_S = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The work and the machine, which stay the same while over-sampling factors are compared."""

    cost: Cost
    length_of: LengthDistribution
    num_groups: int = 32  # N
    group_size: int = 8  # G
    max_response_tokens: int = 16384
    prompt_tokens: int = 256
    num_engines: int = 1
    tick_steps: int = 8
    max_batched_tokens: int = 8192  # tokens of one engine step
    block_tokens: int = BLOCK_TOKENS  # block size of the prefix cache
    max_staleness: int = 8
    finish_stale: bool = True
    keeps_parked: bool = False  # whether parked samples keep their KV cache
    no_signal_frac: float = 0.0  # share of groups whose rewards are all equal
    is_filtered: bool = False  # such groups are rejected, and others generated in their place
    score_s: float = 0.0  # time from the end of a sample to its reward
    turns: Turns | None = None  # None: a response is one turn, without an environment
    rest_s: float = 0.0  # time of a step outside the rollout: update and weight sync
    seed: int = 0
    scale: Scale = field(default_factory=Scale)  # what the simulated work stands for

    def __post_init__(self) -> None:
        """Raise ValueError for a scenario that cannot be simulated."""
        for name in (
            *("num_groups", "group_size", "max_response_tokens", "prompt_tokens", "num_engines"),
            *("tick_steps", "max_batched_tokens", "block_tokens"),
        ):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        if min(self.max_staleness, self.score_s, self.rest_s) < 0:
            raise ValueError("max_staleness, score_s and rest_s must be >= 0")
        if not 0 <= self.no_signal_frac < 1:
            raise ValueError(f"no_signal_frac must be in [0, 1), got {self.no_signal_frac:g}")
        if self.cost.seconds(EngineWork(1, 1, 1)) <= 0:
            raise ValueError("an engine step must cost something; the engine's cost is all zero")

    @property
    def episodes(self) -> Episodes | None:
        """Return the environment of the samples; None without turns."""
        if self.turns is None:
            return None
        return Episodes(
            turns=self.turns,
            length_of=self.length_of,
            max_response_tokens=self.max_response_tokens,
            seed=self.seed,
        )

    def rules(self, *, refill: bool) -> StepRules:
        """Return the collector's rules for this work; there are no time limits."""
        return StepRules(
            num_groups=self.num_groups,
            group_size=self.group_size,
            refill=refill,
            max_staleness=self.max_staleness,
            finish_stale=self.finish_stale,
            max_rejected_groups=0,
            group_filter=_WITH_SIGNAL if self.is_filtered else Filter(),
            abort_timeout_s=_FOREVER_S,
            tick_timeout_s=_FOREVER_S,
            deterministic=False,
            requests=RequestRules(
                tick_steps=self.tick_steps,
                max_response_tokens=self.max_response_tokens,
                seed=self.seed,
            ),
        )


def simulate(
    scenario: Scenario,
    *,
    over_sampling_factor: float,
    refill: bool,
    num_steps: int,
    warmup_steps: int,
    on_step: Callable[[int, Collection], None] | None = None,
) -> Outcome:
    """Simulate `warmup_steps` steps that fill the buffer, then `num_steps` steps that count.

    The outcome depends only on the arguments, including seeds. `on_step` is called with every
    step.
    """
    clock, engines, collector = _parts(scenario, over_sampling_factor, refill=refill)
    outcome, scale = Outcome(factor=over_sampling_factor), scenario.scale
    for version in range(warmup_steps + num_steps):
        for engine in engines:
            engine.set_version(version)
        collection = collector.collect(version)
        clock.move_to(clock() + scenario.rest_s)
        if on_step is not None:
            on_step(version, collection)
        if version < warmup_steps:
            continue
        outcome.add(collection, policy_version=version, scale=scale)
        outcome.rest_s += scenario.rest_s
        parked = scale.groups * scale.tokens * collector.leftovers(under_way=()).parked_tokens
        outcome.peak_parked_tokens = max(outcome.peak_parked_tokens, round(parked))
    held = max(engine.peak_kv_tokens for engine in engines)
    outcome.peak_kv_tokens = round(scale.groups * scale.tokens / scale.engines * held)
    return outcome


def _parts(
    scenario: Scenario, over_sampling_factor: float, *, refill: bool
) -> tuple[VirtualClock, list[SimulatedEngine], Collector]:
    clock, episodes = VirtualClock(), scenario.episodes
    engines = [
        SimulatedEngine(
            length_of=scenario.length_of,
            cost=scenario.cost,
            keeps_parked=scenario.keeps_parked,
            max_batched_tokens=scenario.max_batched_tokens,
            block_tokens=scenario.block_tokens,
            episodes=episodes,
        )
        for _ in range(scenario.num_engines)
    ]
    outside = DelayedScores(
        no_signal_frac=scenario.no_signal_frac,
        score_s=scenario.score_s,
        seed=scenario.seed,
        clock=clock,
        episodes=episodes,
    )
    collector = Collector(
        ParallelEngines(engines, clock=clock),
        outside,
        NumberedPrompts(scenario.prompt_tokens, has_environment=episodes is not None),
        scenario.rules(refill=refill),
        over_sampling_factor=over_sampling_factor,
        clock=clock,
    )
    return clock, engines, collector
