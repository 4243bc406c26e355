"""Simulated engines that measure their own CPU time, with a scorer and a collector for them, for
the benchmark of the controller.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from april_rl.rollout.collector import Collector
from april_rl.rollout.dispatch import RequestRules, auto_tick_steps
from april_rl.rollout.over_sampling import FixedFactor
from april_rl.rollout.ports import Engines
from april_rl.rollout.requests import Requests
from april_rl.rollout.step import StepRules
from april_rl.simulator.engine_cost import EngineCost
from april_rl.simulator.length_distributions import Lognormal, median_for, uniform
from april_rl.simulator.simulated_engine import SimulatedEngine
from april_rl.simulator.world import NumberedPrompts
from april_rl.ticks import Completions, Tick
from april_rl.types import Completion, Request, Sample, Score

_SPEEDS_DIFFER_BY = 0.02
_MAX_BATCHED_TOKENS = 8192  # of one engine step
_FOREVER_S = 1e12


@cache
def tokens(count: int) -> tuple[int, ...]:
    """Return `count` tokens, one shared object per count: 512 engines hold a third of a billion
    tokens, which would fill the memory for no purpose.
    """
    return (0,) * count


class LeanEngine:
    """A simulated engine that shares its token sequences."""

    def __init__(self, engine: SimulatedEngine) -> None:
        """Wrap `engine`."""
        self._engine = engine
        self.set_version = engine.set_version

    def advance(self, submit: Sequence[Request], *, slots: int, max_steps: int) -> Tick:
        """Run a tick of the engine."""
        tick = self._engine.advance(submit, slots=slots, max_steps=max_steps)
        if not tick.finished:
            return tick
        return replace(tick, finished=Completions(map(_lean, tick.finished)))

    def abort(self) -> Completions:
        """Abort the engine's requests."""
        return Completions(map(_lean, self._engine.abort()))


def _lean(completion: Completion) -> Completion:
    shared = tokens(len(completion.token_ids))
    return replace(completion, token_ids=shared, logprobs=shared)


class TimedEngines:
    """`ports.Engines` that measure their own CPU time and when the phases of a step end."""

    def __init__(self, engines: Engines) -> None:
        """Wrap `engines`."""
        self._engines = engines
        self.spent_s = 0.0
        self.num_ticks = 0
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._began_s = self.controller_s()
        self.fill_s = self.until_stop_s = 0.0  # of the controller, since the step began
        self.num_ticks = 0

    @property
    def num_engines(self) -> int:
        """Return the number of engines."""
        return self._engines.num_engines

    def controller_s(self) -> float:
        """Return the CPU seconds of this process outside the engines."""
        return time.process_time() - self.spent_s

    def launch(self, engine: int, submit: Requests, *, slots: int, max_steps: int) -> None:
        """Launch a tick, timed."""
        started = time.process_time()
        self._engines.launch(engine, submit, slots=slots, max_steps=max_steps)
        self.spent_s += time.process_time() - started

    def wait(self, timeout_s: float, *, gather_s: float = 0.0) -> list[tuple[int, Tick]]:
        """Wait for ticks, timed."""
        started = time.process_time()
        if not self.fill_s:
            self.fill_s = self.controller_s() - self._began_s
        ended = self._engines.wait(timeout_s, gather_s=gather_s)
        self.num_ticks += len(ended)
        self.spent_s += time.process_time() - started
        return ended

    def abort(self, timeout_s: float) -> tuple[Sequence[Completion], list[int]]:
        """Abort all engines, timed."""
        started = time.process_time()
        self.until_stop_s = self.controller_s() - self._began_s
        given_back = self._engines.abort(timeout_s)
        self.spent_s += time.process_time() - started
        return given_back


class InstantScorer:
    """A scorer that finds every second sample of a group right, at once."""

    def __init__(self) -> None:
        """Begin with no submitted sample."""
        self._submitted: list[Sample] = []

    def submit(self, sample: Sample, *, group_size: int) -> None:  # noqa: ARG002 (one by one)
        """Score a sample; the next call of `collect` returns it."""
        self._submitted.append(sample)

    def collect(self, timeout_s: float | None) -> list[Score]:  # noqa: ARG002 (nothing to wait for)
        """Return the scores since the last call."""
        samples, self._submitted = self._submitted, []
        return [Score(sample.id, float(sample.index % 2), "scored") for sample in samples]


def simulated_engine(args: argparse.Namespace, number: int) -> SimulatedEngine:
    """Return an engine that gives each sample `args.tokens_per_s`, within a percent."""
    factor = 1 + _SPEEDS_DIFFER_BY * (uniform(0, number, 0) - 0.5)
    step_s = factor / args.tokens_per_s
    median = median_for(args.mean_tokens, sigma=args.sigma, cap=args.max_tokens)
    return SimulatedEngine(
        length_of=Lognormal(median_tokens=median, sigma=args.sigma),
        cost=EngineCost(step_s=step_s, sample_s=0.0, context_token_s=0.0, prefill_token_s=0.0),
        keeps_parked=False,
        max_batched_tokens=_MAX_BATCHED_TOKENS,
    )


def tick_steps(args: argparse.Namespace, num_engines: int) -> int:
    """Return the engine steps of a tick."""
    return args.tick_steps or auto_tick_steps(
        num_engines=num_engines, max_response_tokens=args.max_tokens
    )


def collector_of(
    args: argparse.Namespace, engines: Engines, *, clock: Callable[[], float]
) -> Collector:
    """Return a collector with `args.samples_per_engine` slots per engine."""
    slots = engines.num_engines * args.samples_per_engine
    num_groups = max(1, round(slots / args.over_sampling_factor / args.group_size))
    return Collector(
        engines,
        InstantScorer(),
        NumberedPrompts(args.prompt_tokens),
        StepRules(
            num_groups=num_groups,
            group_size=args.group_size,
            refill=True,
            max_staleness=args.max_staleness,
            finish_stale=True,
            max_rejected_groups=0,
            abort_timeout_s=_FOREVER_S,
            tick_timeout_s=_FOREVER_S,
            deterministic=False,
            requests=RequestRules(
                tick_steps=tick_steps(args, engines.num_engines),
                max_response_tokens=args.max_tokens,
                seed=0,
            ),
        ),
        over_sampling=FixedFactor(slots / (num_groups * args.group_size)),
        keep=lambda scored: scored.has_signal,
        clock=clock,
    )
