"""The modes of the rollout benchmark: the real collector with different settings.

Response lengths are lognormal and a function of the sample's id, so every mode gets the same work.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import numpy as np

from april_rl.rollout.collector import Collector
from april_rl.rollout.dispatch import RequestRules
from april_rl.rollout.over_sampling import OverSampling
from april_rl.rollout.stats import StepStats
from april_rl.rollout.step import StepRules
from april_rl.simulator.in_process import SerialEngines, SingleEngine
from april_rl.simulator.world import DelayedScorer, VirtualClock
from april_rl.ticks import Completions, Tick
from april_rl.types import Completion, Prompt, Request, SampleId

PROMPT_TOKENS = 12
NO_SIGNAL_FRAC = 0.5  # of the groups, which the filtered modes reject


@dataclass(frozen=True, slots=True, kw_only=True)
class CappedLognormal:
    """Lognormal distribution of response lengths; a length is a function of the sample's id."""

    median_tokens: float
    sigma: float
    max_tokens: int

    @classmethod
    def of(cls, args: argparse.Namespace) -> Self:
        """Return the distribution that the command line describes."""
        return cls(
            median_tokens=args.median_tokens, sigma=args.sigma, max_tokens=args.max_response_tokens
        )

    def __call__(self, sample_id: SampleId) -> int:
        """Return the response tokens of a sample, 1 … max_tokens."""
        rng = np.random.default_rng((sample_id.prompt_id, sample_id.index))
        length = self.median_tokens * math.exp(self.sigma * rng.standard_normal())
        return int(min(max(length, 1), self.max_tokens))


class KeepingEngine(SingleEngine, Protocol):
    """An engine that keeps the state of aborted samples until it is told to release it."""

    @property
    def policy_version(self) -> int:
        """Return how often weights were loaded."""

    @property
    def kv_cache_tokens(self) -> int:
        """Return how many tokens fit the KV cache."""

    def release_parked(self) -> None:
        """Release the state of parked samples."""


class DrawnLengthsEngine:
    """An engine whose responses end at the length that the distribution gives."""

    def __init__(self, engine: KeepingEngine, length_of: CappedLognormal, *, keeps: bool) -> None:
        """`engine` must not end responses by itself; with `keeps`, parked samples continue without
        a prefill.
        """
        self._engine, self._length_of, self._keeps = engine, length_of, keeps
        self._versions: dict[int, int] = {}  # of the engine, which has many modes, and of this one

    def advance(self, submit: Sequence[Request], *, slots: int, max_steps: int) -> Tick:
        """Run a tick of the engine."""
        capped = [r._replace(max_tokens=self._length_of(r.sample_id) - r.start) for r in submit]
        tick = self._engine.advance(capped, slots=slots, max_steps=max_steps)
        return replace(tick, finished=Completions(map(self._as_mode, tick.finished)))

    def abort(self) -> Completions:
        """Abort the engine's requests."""
        completions = self._engine.abort()
        if not self._keeps:
            self._engine.release_parked()
        return Completions(map(self._as_mode, completions))

    def name_version(self, policy_version: int) -> None:
        """Count tokens that are sampled from now on as this mode's `policy_version`."""
        self._versions[self._engine.policy_version] = policy_version

    def _as_mode(self, completion: Completion) -> Completion:
        return replace(
            completion,
            policy_version=self._versions[completion.policy_version],
            context_version=self._versions[completion.context_version],
        )

    def release_parked(self) -> None:
        """Release parked samples: other modes use the engine next, with samples of the same ids."""
        self._engine.release_parked()


class Prompts:
    """Endless random prompts."""

    def __init__(self, vocabulary: int) -> None:
        """Draw token ids from 4 … vocabulary - 1."""
        self._next, self._vocabulary = 0, vocabulary

    def take(self) -> Prompt:
        """Return the next prompt."""
        rng = np.random.default_rng((7, self._next))
        ids = tuple(int(t) for t in rng.integers(4, self._vocabulary, size=PROMPT_TOKENS))
        prompt = Prompt(id=self._next, token_ids=ids, text="", answer="", source="benchmark")
        self._next += 1
        return prompt


@dataclass(slots=True, kw_only=True)
class Slice:
    """Results of one mode in one round."""

    time_s: float = 0.0
    finished: int = 0
    trained: int = 0
    generated: int = 0
    reprefill: int = 0
    controller_s: float = 0.0
    slot_s: float = 0.0  # Σ over steps of their time times their slots
    occupied_slot_s: float = 0.0
    ticks: list[Tick] = field(default_factory=list)

    def add(self, stats: StepStats, *, trained: int) -> None:
        """Add a step."""
        self.time_s += stats.time_s
        self.finished += stats.finished_samples
        self.trained += trained
        self.generated += stats.generated_tokens
        self.reprefill += stats.reprefill_tokens
        self.controller_s += stats.time_s - stats.waited_s
        self.slot_s += stats.time_s * stats.num_slots
        self.occupied_slot_s += stats.time_s * stats.in_flight_mean
        self.ticks += stats.ticks

    @property
    def occupancy(self) -> float:
        """Return the share of slots in use."""
        return self.occupied_slot_s / self.slot_s


class CollectorMode:
    """Synchronous, one-shot or refill: the real collector, whose buffer is kept over all rounds."""

    def __init__(
        self,
        args: argparse.Namespace,
        engine: KeepingEngine,
        *,
        over_sampling: OverSampling,
        refill: bool,
        keeps: bool = False,
        is_filtered: bool = False,
        is_auto: bool = False,
    ) -> None:
        """Build a collector on the shared engine; `keeps` is rollout.resume=keep, `is_auto` learns
        the over-sampling factor.
        """
        self.is_filtered, self.keeps, self.refill = is_filtered, keeps, refill
        self.is_auto = is_auto
        self.notes: list[str] = []  # why α changed
        self._over_sampling = over_sampling
        length_of = CappedLognormal.of(args)
        self._engine = DrawnLengthsEngine(engine, length_of, keeps=keeps)
        self._needed = args.num_groups * args.group_size
        self._version = 0
        self._collector = Collector(
            SerialEngines([self._engine]),
            # A reward that costs nothing: what is measured here is generation.
            DelayedScorer(no_signal_frac=NO_SIGNAL_FRAC, score_s=0.0, seed=0, clock=VirtualClock()),
            Prompts(90),
            StepRules(
                num_groups=args.num_groups,
                group_size=args.group_size,
                refill=refill,
                max_staleness=args.max_staleness,
                finish_stale=True,
                max_rejected_groups=0,
                abort_timeout_s=60.0,
                tick_timeout_s=60.0,
                deterministic=False,
                requests=RequestRules(
                    tick_steps=args.tick_steps, max_response_tokens=args.max_response_tokens, seed=0
                ),
            ),
            over_sampling=over_sampling,
            keep=lambda scored: scored.has_signal or not is_filtered,
        )

    @property
    def factor(self) -> float:
        """Return the present α."""
        return self._over_sampling.factor

    @property
    def is_synchronous(self) -> bool:
        """Return whether no sample starts before its step."""
        return not self.refill and self.factor == 1

    @property
    def name(self) -> str:
        """Return the name in the table."""
        name = "refill" if self.refill else "synchronous" if self.is_synchronous else "one-shot"
        kept = ", keep" if self.keeps else ""
        auto = ", auto" if self.is_auto else ""
        return f"{name}{kept}{auto}{', filtered' if self.is_filtered else ''}"

    def run(self, steps: int, between: Callable[[], None]) -> Slice:
        """Run `steps` steps; in between do what a weight sync does to the engine, untimed.

        With kept state one more step goes before, uncounted: other modes have used the engine, so
        the state has to be computed again.
        """
        done = Slice()
        self._engine.release_parked()
        for number in range(-int(self.keeps), steps):
            between()
            self._engine.name_version(self._version)
            collection = self._collector.collect(self._version)
            self._version += 1
            self.notes += collection.notes
            if number >= 0:
                done.add(collection.stats, trained=self._needed)
        return done
