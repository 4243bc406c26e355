"""The modes of the rollout benchmark: the real collector with different settings.

Response lengths are lognormal and a function of the sample's id, so every mode gets the same work.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from april_rl.lab.simulator.engine_cost import EngineCost
from april_rl.lab.simulator.length_distributions import Lognormal
from april_rl.lab.simulator.simulated_engine import SimulatedEngine
from april_rl.lab.simulator.simulation import Scenario
from april_rl.lab.simulator.world import DelayedScores, VirtualClock
from april_rl.training.rollout.collector import Collector
from april_rl.training.rollout.in_process import SerialEngines, SingleEngine
from april_rl.training.rollout.record import StepRecord
from april_rl.training.rollout.requests import Request
from april_rl.training.rollout.ticks import Completions, Tick, TickWork
from april_rl.types import Completion, Prompt

PROMPT_TOKENS = 12
MAX_BATCHED_TOKENS = 1024  # on CPU, a short part of a prefill stays in the cache


ANY_COST = EngineCost(step_s=1.0, sample_s=0.0, context_token_s=0.0, prefill_token_s=0.0)


def lengths_of(args: argparse.Namespace) -> Lognormal:
    """Return the distribution that the command line describes; the response budget caps it."""
    return Lognormal(median_tokens=args.median_tokens, sigma=args.sigma)


def scenario_of(args: argparse.Namespace, *, keeps: bool) -> Scenario:
    """Return the work that the command line describes; its cost is not known yet."""
    return Scenario(
        cost=ANY_COST,
        length_of=lengths_of(args),
        num_groups=args.num_groups,
        group_size=args.group_size,
        max_response_tokens=args.max_response_tokens,
        prompt_tokens=PROMPT_TOKENS,
        tick_steps=args.tick_steps,
        max_batched_tokens=MAX_BATCHED_TOKENS,
        max_staleness=args.max_staleness,
        keeps_parked=keeps,
    )


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

    def __init__(self, engine: KeepingEngine, length_of: Lognormal, *, keeps: bool) -> None:
        """`engine` must not end responses by itself; with `keeps`, parked samples continue without
        a prefill.
        """
        self._engine, self._length_of, self._keeps = engine, length_of, keeps
        # Versions of the engine, which many modes use, and of this mode.
        self._versions: dict[int, int] = {}
        self.ticks: list[TickWork] = []

    def advance(self, submit: Sequence[Request], *, slots: int, max_steps: int) -> Tick:
        """Run a tick of the engine."""
        ending = [r._replace(max_tokens=self._room(r)) for r in submit]
        tick = self._engine.advance(ending, slots=slots, max_steps=max_steps)
        self.ticks.append(TickWork.of(tick))
        return replace(tick, finished=Completions(map(self._as_mode, tick.finished)))

    def _room(self, request: Request) -> int:
        return min(request.max_tokens, self._length_of(request.sample_id) - request.start)

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
    slot_s: float = 0.0  # Σ over steps of time × slots
    occupied_slot_s: float = 0.0

    def add(self, record: StepRecord, *, trained: int) -> None:
        """Add a step."""
        self.time_s += record.time_s
        self.finished += record.finished_samples
        self.trained += trained
        self.generated += record.generated_tokens
        self.reprefill += record.reprefill_tokens
        self.controller_s += record.controller_s
        self.slot_s += record.time_s * record.num_slots
        self.occupied_slot_s += record.time_s * record.in_flight_mean

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
        factor: float,
        *,
        refill: bool,
        keeps: bool,
    ) -> None:
        """Build a collector on the shared engine; `keeps` is rollout.resume=keep."""
        unfilled = "synchronous" if factor == 1 else "one-shot"
        self.name = ("refill" if refill else unfilled) + (", keep" if keeps else "")
        self._keeps = keeps
        self.factor = factor
        self.engine = DrawnLengthsEngine(engine, lengths_of(args), keeps=keeps)
        self._engines: list[SingleEngine] = [self.engine]  # this list is read at every tick
        self._args = args
        self._needed = args.num_groups * args.group_size
        self._version = 0
        self._collector = Collector(
            SerialEngines(self._engines),
            # A reward without cost: the benchmark measures generation.
            DelayedScores(no_signal_frac=0.0, score_s=0.0, seed=0, clock=VirtualClock()),
            Prompts(90),
            replace(
                scenario_of(args, keeps=keeps).rules(refill=refill),
                abort_timeout_s=60.0,
                tick_timeout_s=60.0,
            ),
            over_sampling_factor=factor,
        )

    def simulate(self, steps: int, cost: EngineCost) -> None:
        """Run `steps` steps on a simulated engine, which takes a hundredth of the time.

        Its samples have the same lengths, so the same ones are in flight and parked afterwards.
        """
        simulated = SimulatedEngine(
            length_of=lengths_of(self._args),
            cost=cost,
            keeps_parked=self._keeps,
            max_batched_tokens=MAX_BATCHED_TOKENS,
        )
        self._engines[0] = simulated
        for _ in range(steps):
            simulated.set_version(self._version)
            self._collector.collect(self._version)
            self._version += 1
        self._engines[0] = self.engine

    def run(self, steps: int, between: Callable[[], None]) -> Slice:
        """Run `steps` steps; in between do what a weight sync does to the engine, untimed.

        If state is kept, an uncounted step runs first: other modes have used the engine, so the
        state has to be computed again.
        """
        done = Slice()
        self.engine.release_parked()
        for number in range(-int(self._keeps), steps):
            between()
            self.engine.name_version(self._version)
            collection = self._collector.collect(self._version)
            self._version += 1
            if number >= 0:
                done.add(collection.record, trained=self._needed)
        return done
