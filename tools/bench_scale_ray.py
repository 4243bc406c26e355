"""The same collector over real Ray: what a tick and a sample cost on their way, and how long a stop
takes.

A tick is measured without requests, a sample in ticks whose requests are answered at once, with
responses of the whole length and tokens as various as real ones.

How long engines have nothing to compute, because the controller or Ray is late, is measured in a
scale model: at most eight simulated engines in actors that sleep until their ticks end, on a clock
that runs as many times faster as there are engines for each actor (and a few times at least, so
that a step takes seconds). Controller and Ray then have the ticks and samples a second that so many
engines would give them, and requests at the start of a step in the same proportion to its length.
A tick is as late on any clock: idle time is set against what engines compute on a real one.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

import ray
from bench_scale_engines import TimedEngines, collector_of, simulated_engine, tick_steps

from april_rl.rollout.requests import Requests
from april_rl.runtime.cluster import start_ray, stop_ray
from april_rl.runtime.engines import RayEngines
from april_rl.runtime.supervision.watchdog import Watchdog
from april_rl.ticks import Completions, Tick
from april_rl.types import Completion, Request

_VOCABULARY = 151_936  # of Qwen3
_OFFSETS = 1000  # places in an engine's random tokens at which a response may begin
_ACTORS, _FASTER = 8, 4.0  # of the scale model: most actors, and the least its clock is faster
_EMPTY_TICKS = 400
_ANSWERED_TICKS, _ANSWERS = 8, 32  # measured, and requests in each
_PATIENCE_S = 120.0


class EngineTimes(NamedTuple):
    """How an engine spent a step, until the end of its last tick."""

    idle_s: float  # outside ticks, with the wait for the first one
    busy_s: float  # in ticks
    first_tick_s: float  # from the beginning of the step to the first tick


class SleepingEngine:
    """A simulated engine that really takes as long as it simulates, with token ids as varied as
    real ones; it counts the time in which it has nothing to compute.
    """

    def __init__(self, args: argparse.Namespace, number: int) -> None:
        """Create engine `number` of the benchmark."""
        self._engine, self._random = simulated_engine(args, number), Random(number)
        count = args.max_tokens + _OFFSETS
        self._token_ids = array("i", (self._random.randrange(_VOCABULARY) for _ in range(count)))
        self._logprobs = array("d", (-self._random.random() for _ in range(count)))
        self._idle_s = self._busy_s = self._first_tick_s = 0.0
        self._ended = time.monotonic()

    def set_version(self, policy_version: int) -> None:
        """Begin a step, which will sample as `policy_version`."""
        self._engine.set_version(policy_version)
        self._idle_s = self._busy_s = self._first_tick_s = 0.0
        self._ended = time.monotonic()

    def advance(self, submit: Requests, *, slots: int, max_steps: int) -> Tick:
        """Run a tick as the worker does, no faster than an engine would."""
        began = time.monotonic()
        tick = self._engine.advance(submit.each(), slots=slots, max_steps=max_steps)
        tick = replace(tick, finished=Completions(map(self._various, tick.finished)))
        time.sleep(max(0.0, began + tick.elapsed_s - time.monotonic()))
        self._idle_s += began - self._ended
        if not self._busy_s:
            self._first_tick_s = self._idle_s
        self._ended = time.monotonic()
        self._busy_s += self._ended - began
        return tick

    def abort(self) -> Completions:
        """Return all samples, as the engine does."""
        return Completions(map(self._various, self._engine.abort()))

    def times(self) -> EngineTimes:
        """Return how the time since the step began was spent."""
        return EngineTimes(
            idle_s=self._idle_s, busy_s=self._busy_s, first_tick_s=self._first_tick_s
        )

    def _various(self, completion: Completion) -> Completion:
        first = self._random.randrange(_OFFSETS)
        last = first + len(completion.token_ids)
        return replace(
            completion, token_ids=self._token_ids[first:last], logprobs=self._logprobs[first:last]
        )


class AnsweringEngine:
    """An engine that finishes each request in one tick, after the mean number of tokens."""

    def __init__(self, args: argparse.Namespace, number: int) -> None:
        """Create engine `number` of the benchmark."""
        random, count = Random(number), round(args.mean_tokens)
        self._token_ids = array("i", (random.randrange(_VOCABULARY) for _ in range(count)))
        self._logprobs = array("d", (-random.random() for _ in range(count)))

    def advance(self, submit: Requests, *, slots: int, max_steps: int) -> Tick:  # noqa: ARG002
        """Return all requests, finished."""
        requests = submit.each()
        return Tick(
            finished=Completions(map(self._answer, requests)),
            num_running=0,
            num_queued=0,
            engine_steps=1,
            slot_steps=len(requests),
            context_token_steps=0,
            generated_tokens=len(requests) * len(self._token_ids),
            prefilled_tokens=0,
            elapsed_s=0.0,
        )

    def abort(self) -> Completions:
        """Return nothing."""
        return []

    def _answer(self, request: Request) -> Completion:
        return Completion(
            sample_id=request.sample_id,
            start=request.start,
            policy_version=0,
            context_version=0,
            token_ids=self._token_ids[:],  # its own, or pickle would send one for all
            logprobs=self._logprobs[:],
            finish_reason="stop",
        )


class BenchWorkers:
    """The part of `Workers` that `RayEngines` uses: one engine each, and a watchdog."""

    def __init__(
        self,
        engine: type[SleepingEngine | AnsweringEngine],
        args: argparse.Namespace,
        num_engines: int,
        *,
        folder: Path,
    ) -> None:
        """`folder` is for the watchdog's report."""
        env = {"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}}
        actor = ray.remote(engine).options(num_cpus=0, runtime_env=env)
        self.actors: list[Any] = [actor.remote(args, number) for number in range(num_engines)]
        self.engines = [[each] for each in self.actors]
        self.watchdog = Watchdog(
            report=folder / "stall_report.txt",
            stall_timeout_s=_PATIENCE_S,
            call_timeout_s=_PATIENCE_S,
        )
        self.policy_version = 0

    def set_version(self, policy_version: int) -> None:
        """Tell every engine the policy version that it samples."""
        self.policy_version = policy_version
        ray.get([each.set_version.remote(policy_version) for each in self.actors])

    def times(self) -> list[EngineTimes]:
        """Return how every engine spent the step."""
        return list(ray.get([each.times.remote() for each in self.actors]))

    def end(self) -> None:
        """End the processes of the engines."""
        for each in self.actors:
            ray.kill(each)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCost:
    """What Ray costs in the controller's process, in CPU seconds of all its threads."""

    empty_tick_s: float  # each, of ticks without a request
    sample_s: float  # each, there with prompt and half a response, and back with a whole one
    faster: float  # the clock of the scale model than a real one
    ticks: int  # of the step that was run
    rollout_s: float  # of that step
    stop_s: float  # from the last group wanted until everything is parked
    first_tick_s: float  # from the beginning of the step to an engine's first tick, on average
    idle_frac: float  # of the engines' time in which they have nothing to compute, on a real clock


def measure_ray(
    args: argparse.Namespace, num_engines: int, *, on_progress: Callable[[int], None]
) -> RayCost:
    """Run a step over Ray, after one that fills the buffer; report how many groups are ready."""
    num_actors = min(num_engines, _ACTORS)
    with _workers(AnsweringEngine, args, num_actors) as workers:
        sample_s = _sample_s(TimedEngines(_ray_engines(workers)), args)
    model = argparse.Namespace(**vars(args))
    faster = max(_FASTER, num_engines / num_actors)
    model.tokens_per_s *= faster
    model.tick_steps = tick_steps(args, num_engines)
    with _workers(SleepingEngine, model, num_actors) as workers:
        engines = TimedEngines(_ray_engines(workers))
        empty_tick_s = _empty_tick_s(engines)
        collector = collector_of(model, engines, clock=time.perf_counter)
        for version in range(2):
            workers.set_version(version)
            engines.begin()
            collection = collector.collect(version, on_progress=lambda n, _: on_progress(n))
        times = workers.times()
        # The first tick waits for all the samples that so many engines are sent.
        other_firsts = num_engines / num_actors - 1
        idle_s = sum(each.idle_s + other_firsts * each.first_tick_s for each in times)
        busy_s = faster * sum(each.busy_s for each in times)
        return RayCost(
            empty_tick_s=empty_tick_s,
            sample_s=sample_s,
            faster=faster,
            ticks=engines.num_ticks,
            rollout_s=collection.stats.time_s,
            stop_s=collection.stats.stop_s,
            first_tick_s=fmean(each.first_tick_s for each in times),
            idle_frac=idle_s / (idle_s + busy_s),
        )


def _ray_engines(workers: BenchWorkers) -> RayEngines:
    return RayEngines(workers, deterministic=False)  # type: ignore[arg-type]


def _sample_s(engines: TimedEngines, args: argparse.Namespace) -> float:
    """Return the CPU seconds of a request with its completion and ticks, after a warm-up round."""
    random = Random(0)
    half = array("i", (random.randrange(_VOCABULARY) for _ in range(round(args.mean_tokens / 2))))
    prompt = [random.randrange(_VOCABULARY) for _ in range(args.prompt_tokens)]
    for number in range(1 + _ANSWERED_TICKS):
        if number == 1:
            before_s = engines.spent_s
        for engine in range(engines.num_engines):
            indices = range(engine * _ANSWERS, (engine + 1) * _ANSWERS)
            submit = _requests(number, indices, prompt=prompt, so_far=half)
            engines.launch(engine, submit, slots=_ANSWERS, max_steps=1)
        ended = 0
        while ended < engines.num_engines:
            ended += len(engines.wait(_PATIENCE_S))
    return (engines.spent_s - before_s) / (_ANSWERED_TICKS * _ANSWERS * engines.num_engines)


def _requests(
    number: int, indices: Sequence[int], *, prompt: list[int], so_far: array[int]
) -> Requests:
    """Return requests with a token array each, since pickle writes a shared one only once."""
    return Requests(
        max_response_tokens=2 * len(so_far),
        run_seed=0,
        prompt_ids=[number] * len(indices),
        indices=indices,
        prompt_token_ids=[(*prompt,) for _ in indices],
        parts=[(so_far[:],) for _ in indices],
    )


def _empty_tick_s(engines: TimedEngines) -> float:
    """Return the CPU seconds of a tick without work, two in flight on every engine; as many come
    before, since Ray's first calls cost several times as much.
    """
    for engine in [*range(engines.num_engines)] * 2:
        engines.launch(engine, Requests(1, 0), slots=1, max_steps=1)
    spent_s = 0.0
    for _ in range(2):
        before_s, ended = engines.spent_s, 0
        while ended < _EMPTY_TICKS:
            for engine, _ in engines.wait(_PATIENCE_S):
                engines.launch(engine, Requests(1, 0), slots=1, max_steps=1)
                ended += 1
        spent_s = (engines.spent_s - before_s) / ended
    engines.abort(_PATIENCE_S)
    return spent_s


@contextmanager
def _workers(
    engine: type[SleepingEngine | AnsweringEngine], args: argparse.Namespace, num_engines: int
) -> Iterator[BenchWorkers]:
    """Start embedded Ray and its actors, and end them afterwards."""
    start_ray(num_workers=num_engines, address=None)
    with tempfile.TemporaryDirectory() as folder:
        workers = BenchWorkers(engine, args, num_engines, folder=Path(folder))
        try:
            yield workers
        finally:
            workers.end()
            stop_ray()
