"""The same collector over real Ray: what a tick and a sample cost on their way, and how long a stop
takes.

A tick is measured without requests, a sample in ticks whose requests are answered at once, with
responses of the whole length and tokens as various as real ones. The step that shows the stop runs
on simulated engines in actors that sleep until their ticks end, so that two cores carry eight of
them; responses are short there, so that it takes seconds.
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
from typing import Any

import ray
from bench_scale_engines import TimedEngines, collector_of, simulated_engine

from april_rl.rollout.requests import Requests
from april_rl.runtime.cluster import start_ray, stop_ray
from april_rl.runtime.engines import RayEngines
from april_rl.runtime.supervision.watchdog import Watchdog
from april_rl.ticks import Completions, Tick
from april_rl.types import Completion, Request

_VOCABULARY = 151_936  # of Qwen3
_SHORTER = 9.0  # responses than in the simulated steps
_EMPTY_TICKS = 400
_ANSWERED_TICKS, _ANSWERS = 8, 32  # measured, and requests in each
_PATIENCE_S = 120.0


class SleepingEngine:
    """A simulated engine that takes as long as it says, with tokens as various as real ones."""

    def __init__(self, args: argparse.Namespace, number: int) -> None:
        """Engine `number` of the benchmark."""
        self._engine, self._random = simulated_engine(args, number), Random(number)

    def set_version(self, policy_version: int) -> None:
        """As the engine does."""
        self._engine.set_version(policy_version)

    def advance(self, submit: Requests, *, slots: int, max_steps: int) -> Tick:
        """As the worker does, and no sooner than an engine would."""
        ends = time.monotonic()
        tick = self._engine.advance(submit.each(), slots=slots, max_steps=max_steps)
        ends += tick.elapsed_s
        tick = replace(tick, finished=Completions(map(self._various, tick.finished)))
        time.sleep(max(0.0, ends - time.monotonic()))
        return tick

    def abort(self) -> Completions:
        """As the engine does."""
        return Completions(map(self._various, self._engine.abort()))

    def _various(self, completion: Completion) -> Completion:
        count, random = len(completion.token_ids), self._random
        return replace(
            completion,
            token_ids=array("i", (random.randrange(_VOCABULARY) for _ in range(count))),
            logprobs=array("d", (-random.random() for _ in range(count))),
        )


class AnsweringEngine:
    """Finishes each request in the tick it comes with, after the mean number of tokens."""

    def __init__(self, args: argparse.Namespace, number: int) -> None:
        """Engine `number` of the benchmark."""
        random, count = Random(number), round(args.mean_tokens)
        self._token_ids = array("i", (random.randrange(_VOCABULARY) for _ in range(count)))
        self._logprobs = array("d", (-random.random() for _ in range(count)))

    def advance(self, submit: Requests, *, slots: int, max_steps: int) -> Tick:  # noqa: ARG002
        """All of it finished."""
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
        """Nothing is left."""
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
    """What `RayEngines` asks of the workers: an engine each, and a watchdog."""

    def __init__(
        self,
        engine: type[SleepingEngine | AnsweringEngine],
        args: argparse.Namespace,
        num_engines: int,
        *,
        folder: Path,
    ) -> None:
        """`folder` for the watchdog's report, should there be one."""
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
        """Every engine samples as `policy_version`."""
        self.policy_version = policy_version
        ray.get([each.set_version.remote(policy_version) for each in self.actors])

    def end(self) -> None:
        """Their processes."""
        for each in self.actors:
            ray.kill(each)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCost:
    """What Ray costs the controller's process, in CPU seconds of all its threads."""

    empty_tick_s: float  # each, of ticks without a request
    sample_s: float  # each, there with prompt and half a response, and back with a whole one
    ticks: int  # of the step that was run
    rollout_s: float  # of that step
    stop_s: float  # from the last group wanted until everything is parked


def measure_ray(
    args: argparse.Namespace, num_engines: int, *, on_progress: Callable[[int], None]
) -> RayCost:
    """One step over Ray, after one that fills the buffer; `on_progress` is told of ready groups."""
    with _workers(AnsweringEngine, args, num_engines) as workers:
        sample_s = _sample_s(TimedEngines(_ray_engines(workers)), args)
    short = argparse.Namespace(**vars(args))
    short.mean_tokens, short.max_tokens = args.mean_tokens / _SHORTER, int(args.max_tokens / 9)
    with _workers(SleepingEngine, short, num_engines) as workers:
        engines = TimedEngines(_ray_engines(workers))
        empty_tick_s = _empty_tick_s(engines)
        collector = collector_of(short, engines, clock=time.perf_counter)
        for version in range(2):
            workers.set_version(version)
            engines.begin()
            collection = collector.collect(version, on_progress=lambda n, _: on_progress(n))
        return RayCost(
            empty_tick_s=empty_tick_s,
            sample_s=sample_s,
            ticks=engines.num_ticks,
            rollout_s=collection.stats.time_s,
            stop_s=collection.stats.stop_s,
        )


def _ray_engines(workers: BenchWorkers) -> RayEngines:
    return RayEngines(workers, deterministic=False)  # type: ignore[arg-type]


def _sample_s(engines: TimedEngines, args: argparse.Namespace) -> float:
    """CPU seconds of a request and its completion, ticks included; one round is a warm-up."""
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
    """Samples of prompt `number`, with tokens of their own, or pickle would write them once."""
    return Requests(
        max_response_tokens=2 * len(so_far),
        run_seed=0,
        prompt_ids=[number] * len(indices),
        indices=indices,
        prompt_token_ids=[(*prompt,) for _ in indices],
        parts=[(so_far[:],) for _ in indices],
    )


def _empty_tick_s(engines: TimedEngines) -> float:
    """CPU seconds of a tick that has nothing to do, two under way on every engine; as many come
    before, for Ray's first calls cost several times as much.
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
    """Embedded Ray and its actors, and nothing left of them."""
    start_ray(num_workers=num_engines, address=None)
    with tempfile.TemporaryDirectory() as folder:
        workers = BenchWorkers(engine, args, num_engines, folder=Path(folder))
        try:
            yield workers
        finally:
            workers.end()
            stop_ray()
