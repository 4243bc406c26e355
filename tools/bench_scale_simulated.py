"""The real collector on simulated engines side by side, and the CPU seconds that are its own.

Engines advance on a virtual clock and note the CPU time they take; what else the process spends in
a step is the controller's. They differ a little in speed, so that their ticks end one by one and
the controller is asked after each: the worst case, for a busy one would get several at once.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench_scale_engines import (
    LeanEngine,
    TimedEngines,
    collector_of,
    simulated_engine,
)

from april_rl.algorithm.advantages import by_group, grpo
from april_rl.algorithm.shaping import with_overlong_penalty
from april_rl.batch.plan import plan_micro_batches
from april_rl.rollout.collector import Collection
from april_rl.rollout.stats import StepStats
from april_rl.simulator.world import ParallelEngines, VirtualClock
from april_rl.types import ScoredGroup

_ROW_TOKENS, _HIDDEN_SIZE = 32_768, 2560  # learner.max_tokens; of Qwen3-4B


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What one step cost the controller in CPU seconds, by phase."""

    rollout_s: float  # of virtual time
    fill_s: float  # until the first wait: every slot gets its request
    generate_s: float  # from then until the stop: ticks, finished samples, new requests
    park_s: float  # what comes back from the abort, and the choice of the groups
    reward_s: float  # advantages and overlong penalty of the trained groups
    plan_s: float  # which sample goes into which micro-batch
    metrics_s: float  # of the step, and the probes
    ticks: int
    finished_samples: int
    aborted_samples: int
    generated_tokens: int

    @property
    def collect_s(self) -> float:
        """Return the seconds of all of `collect`."""
        return self.fill_s + self.generate_s + self.park_s

    @property
    def controller_s(self) -> float:
        """Return all seconds of the controller in the step."""
        return self.collect_s + self.reward_s + self.plan_s + self.metrics_s


class SimulatedRun:
    """A collector, simulated engines, and their common clock."""

    def __init__(self, args: argparse.Namespace, num_engines: int) -> None:
        """Create `num_engines` engines with `args.samples_per_engine` samples each in flight."""
        self._args, self._version = args, 0
        self._clock = VirtualClock()
        self._each = [LeanEngine(simulated_engine(args, engine)) for engine in range(num_engines)]
        self.engines = TimedEngines(ParallelEngines(self._each, clock=self._clock))
        self.collector = collector_of(args, self.engines, clock=self._clock)

    def step(self, on_progress: Callable[[int], None]) -> StepCost:
        """Run one step; `on_progress` gets the number of ready groups."""
        for engine in self._each:
            engine.set_version(self._version)
        self.engines.begin()
        started = self.engines.controller_s()
        collection = self.collector.collect(
            self._version, on_progress=lambda ready, stats: on_progress(_shown(ready, stats))
        )
        collect_s = self.engines.controller_s() - started
        reward_s = _seconds(lambda: _advantages(collection, self._args.max_tokens))
        plan_s = _seconds(lambda: _plan(collection.groups, self.engines.num_engines))
        metrics_s = _seconds(lambda: self._metrics(collection))
        self._version += 1
        stats = collection.stats
        return StepCost(
            rollout_s=stats.time_s,
            fill_s=self.engines.fill_s,
            generate_s=self.engines.until_stop_s - self.engines.fill_s,
            park_s=collect_s - self.engines.until_stop_s,
            reward_s=reward_s,
            plan_s=plan_s,
            metrics_s=metrics_s,
            ticks=self.engines.num_ticks,
            finished_samples=stats.finished_samples,
            aborted_samples=len(stats.progress) - stats.finished_samples,
            generated_tokens=stats.generated_tokens,
        )

    def _metrics(self, collection: Collection) -> None:
        collection.stats.metrics(num_needed=len(collection.groups) * self._args.group_size)


def _shown(ready: int, stats: StepStats) -> int:
    """Format the progress as the trainer does after each wait."""
    f"{stats.generated_tokens / max(stats.elapsed_s, 1e-9):,.0f} tokens/s"
    return ready


def _seconds(part: Callable[[], object]) -> float:
    started = time.process_time()
    part()
    return time.process_time() - started


def _advantages(collection: Collection, max_tokens: int) -> None:
    rewards = with_overlong_penalty(
        [scored.rewards for scored in collection.groups],
        collection.stats.trained_lengths,
        max_response_tokens=max_tokens,
        buffer_frac=0.25,
        penalty=1.0,
    )
    by_group(grpo)(rewards)


def _plan(groups: Sequence[ScoredGroup], num_ranks: int) -> None:
    lengths = [
        len(scored.group.prompt.token_ids) + sample.num_tokens
        for scored in groups
        for sample in scored.group.samples
    ]
    plan_micro_batches(
        lengths, num_ranks=num_ranks, max_tokens=_ROW_TOKENS, hidden_size=_HIDDEN_SIZE
    )
