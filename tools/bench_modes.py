"""The modes of the rollout benchmark: the real collector in its three ways, and the limit.

Response lengths follow a lognormal law and are drawn from a sample's id, so every mode is given the
same work.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from april_rl.rollout.collector import Collector
from april_rl.rollout.factor import FixedFactor
from april_rl.rollout.seeds import request_seed
from april_rl.rollout.serial import SerialEngines, SingleEngine
from april_rl.types import Completion, Prompt, Request, Sample, SampleId, Score, Tick

PROMPT_TOKENS = 12
_PREFILL_STEPS = 12  # enough to put every sample of the limit back before the clock starts
_LIMIT_STEP_S = 1.5  # a slice of the limit lasts about as long as one of the collector


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthLaw:
    """Lognormal response lengths, a function of the sample's id."""

    median_tokens: float
    sigma: float
    max_tokens: int

    def __call__(self, sample_id: SampleId) -> int:
        """Response tokens of a sample, 1 … max_tokens."""
        rng = np.random.default_rng((sample_id.prompt_id, sample_id.index))
        length = self.median_tokens * math.exp(self.sigma * rng.standard_normal())
        return int(min(max(length, 1), self.max_tokens))


class LawfulEngine:
    """An engine whose samples end when the length law says so."""

    def __init__(self, engine: SingleEngine, law: LengthLaw) -> None:
        """`engine` must not stop by itself."""
        self._engine, self._law = engine, law

    def advance(self, submit: Sequence[Request], *, slots: int, max_steps: int) -> Tick:
        """As the engine does."""
        lawful = [replace(r, max_tokens=self._law(r.sample_id) - r.start) for r in submit]
        return self._engine.advance(lawful, slots=slots, max_steps=max_steps)

    def abort(self) -> list[Completion]:
        """As the engine does."""
        return self._engine.abort()


class Prompts:
    """Endless random prompts ."""

    def __init__(self, vocabulary: int) -> None:
        """Token ids 4 … vocabulary - 1."""
        self._next, self._vocabulary = 0, vocabulary

    def take(self) -> Prompt:
        """The next prompt."""
        rng = np.random.default_rng((7, self._next))
        ids = tuple(int(t) for t in rng.integers(4, self._vocabulary, size=PROMPT_TOKENS))
        prompt = Prompt(id=self._next, token_ids=ids, text="", answer="", source="benchmark")
        self._next += 1
        return prompt


class InstantScorer:
    """A reward that costs nothing: what is measured here is generation."""

    def __init__(self) -> None:
        """Nothing submitted."""
        self._scores: list[Score] = []

    def submit(self, sample: Sample) -> None:
        """Score by place in the group, so that every group has signal."""
        self._scores.append(
            Score(sample_id=sample.id, value=float(sample.index % 2), outcome="scored")
        )

    def collect(self, timeout_s: float | None) -> list[Score]:  # noqa: ARG002 (never waits)
        """All of them."""
        scores, self._scores = self._scores, []
        return scores


@dataclass(slots=True, kw_only=True)
class Slice:
    """What one mode did in one round."""

    time_s: float = 0.0
    finished: int = 0
    trained: int = 0
    generated: int = 0
    reprefill: int = 0
    controller_s: float = 0.0
    occupancy: float = 0.0


class CollectorMode:
    """Synchronous, one-shot or refill: the real collector, its buffer kept over all rounds."""

    def __init__(
        self, args: argparse.Namespace, engine: LawfulEngine, *, factor: float, refill: bool
    ) -> None:
        """A collector of its own on the shared engine."""
        self.factor = factor
        self.name = "refill" if refill else "synchronous" if factor == 1 else "one-shot"
        self._needed = args.num_groups * args.group_size
        self._version = 0
        self._collector = Collector(
            SerialEngines([engine]),
            InstantScorer(),
            Prompts(90),
            num_groups=args.num_groups,
            group_size=args.group_size,
            over_sampling=FixedFactor(factor),
            refill=refill,
            max_response_tokens=args.max_response_tokens,
            max_staleness=8,
            finish_stale=True,
            keep=lambda scored: True,  # noqa: ARG005
            max_rejected_groups=0,
            tick_steps=args.tick_steps,
            abort_timeout_s=60.0,
            tick_timeout_s=60.0,
            deterministic=False,
            seed=0,
        )

    def run(self, steps: int, between: Callable[[], None]) -> Slice:
        """`steps` steps, with what a weight sync does to the engine's cache in between, untimed."""
        done = Slice()
        for _ in range(steps):
            between()
            stats = self._collector.collect(self._version).stats
            self._version += 1
            done.time_s += stats.time_s
            done.finished += stats.finished_samples
            done.trained += self._needed
            done.generated += stats.generated_tokens
            done.reprefill += stats.reprefill_tokens
            done.controller_s += stats.time_s - stats.waited_s
            done.occupancy += stats.in_flight_mean / stats.num_slots / steps
        return done


class Limit:
    """An engine never short of work and never aborted, with `factor`·N·G samples in flight.

    Other modes use the engine in between, so its samples are put back before the clock starts.
    """

    name = "limit"

    def __init__(self, args: argparse.Namespace, engine: LawfulEngine, *, factor: float) -> None:
        """Samples in flight are kept from round to round."""
        self.factor = factor
        self._engine, self._args = engine, args
        self._slots = round(factor * args.num_groups * args.group_size)
        self._prompts, self._held = Prompts(90), deque[Sample]()

    def run(self, steps: int, between: Callable[[], None]) -> Slice:
        """About as long as `steps` steps of a collector take."""
        between()
        live: dict[SampleId, Sample] = {}
        self._advance(live, _PREFILL_STEPS)
        ticks: list[Tick] = []
        started = time.perf_counter()
        while time.perf_counter() - started < steps * _LIMIT_STEP_S:
            ticks.append(self._advance(live, self._args.tick_steps))
        time_s = time.perf_counter() - started
        for completion in self._engine.abort():
            sample = live[completion.sample_id]
            self._held.append(sample.extended(completion) if completion.token_ids else sample)
        slot_steps = sum(tick.slot_steps for tick in ticks)
        engine_steps = sum(tick.engine_steps for tick in ticks)
        finished = sum(len(tick.finished) for tick in ticks)
        return Slice(
            time_s=time_s,
            finished=finished,
            trained=finished,
            generated=sum(tick.generated_tokens for tick in ticks),
            occupancy=slot_steps / engine_steps / self._slots,
        )

    def _advance(self, live: dict[SampleId, Sample], max_steps: int) -> Tick:
        """A tick with the queue filled up before it."""
        submit = []
        while len(live) < self._slots + self._slots // 4:
            if not self._held:
                prompt = self._prompts.take()
                indices = range(self._args.group_size)
                self._held.extend(Sample(prompt=prompt, index=i) for i in indices)
            sample = self._held.popleft()
            live[sample.id] = sample
            submit.append(self._request(sample))
        tick = self._engine.advance(submit, slots=self._slots, max_steps=max_steps)
        for completion in tick.finished:
            del live[completion.sample_id]
        return tick

    def _request(self, sample: Sample) -> Request:
        return Request(
            sample_id=sample.id,
            token_ids=sample.prompt.token_ids + sample.token_ids,
            start=sample.num_tokens,
            max_tokens=self._args.max_response_tokens,
            seed=request_seed(0, sample.id, len(sample.completions)),
        )
