"""The same collector over real Ray: what a tick and a token cost on their way, and how long a stop
takes.

The engines are simulated ones in actors that sleep until their ticks end, so that two cores carry
eight of them; tokens and log-probabilities are as various as real ones. Responses are short, so
that a step takes seconds: what a tick or a token costs does not depend on that.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import ray
from bench_scale_engines import TimedEngines, collector_of, simulated_engine

from april_rl.runtime.cluster import start_ray, stop_ray
from april_rl.runtime.engines import RayEngines
from april_rl.runtime.watchdog import Watchdog
from april_rl.types import Completion, Request, Tick

_VOCABULARY = 151_936  # of Qwen3
_SHORTER = 9.0  # responses than in the simulated steps
_EMPTY_TICKS = 400
_PATIENCE_S = 120.0


class SleepingEngine:
    """A simulated engine that takes as long as it says, with tokens as various as real ones."""

    def __init__(self, args: argparse.Namespace, number: int) -> None:
        """Engine `number` of the benchmark."""
        self._engine, self._random = simulated_engine(args, number), Random(number)

    def set_version(self, policy_version: int) -> None:
        """As the engine does."""
        self._engine.set_version(policy_version)

    def advance(self, submit: Sequence[Request], *, slots: int, max_steps: int) -> Tick:
        """As the engine does, and no sooner."""
        ends = time.monotonic()
        tick = self._engine.advance(submit, slots=slots, max_steps=max_steps)
        ends += tick.elapsed_s
        tick = replace(tick, finished=tuple(map(self._various, tick.finished)))
        time.sleep(max(0.0, ends - time.monotonic()))
        return tick

    def abort(self) -> list[Completion]:
        """As the engine does."""
        return [self._various(completion) for completion in self._engine.abort()]

    def _various(self, completion: Completion) -> Completion:
        count, random = len(completion.token_ids), self._random
        return replace(
            completion,
            token_ids=tuple(random.randrange(_VOCABULARY) for _ in range(count)),
            logprobs=tuple(-random.random() for _ in range(count)),
        )


class SleepingWorkers:
    """What `RayEngines` asks of the workers: an engine each, and a watchdog."""

    def __init__(self, args: argparse.Namespace, num_engines: int, *, folder: Path) -> None:
        """`folder` for the watchdog's report, should there be one."""
        env = {"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}}
        actor = ray.remote(SleepingEngine).options(num_cpus=0, runtime_env=env)
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
    """What Ray cost the controller's process in a step, in CPU seconds of all its threads."""

    ticks: int
    tokens: int  # that went to the engines or came back, these with a log-probability each
    rollout_s: float
    calls_s: float  # in launching, waiting and aborting
    empty_tick_s: float  # each, of ticks without a request
    stop_s: float  # from the last group wanted until everything is parked

    @property
    def token_s(self) -> float:
        """Each, of what the ticks by themselves do not cost."""
        return max(0.0, self.calls_s - self.ticks * self.empty_tick_s) / self.tokens


def measure_ray(
    args: argparse.Namespace, num_engines: int, *, on_progress: Callable[[int], None]
) -> RayCost:
    """One step over Ray, after one that fills the buffer; `on_progress` is told of ready groups."""
    short = argparse.Namespace(**vars(args))
    short.mean_tokens, short.max_tokens = args.mean_tokens / _SHORTER, int(args.max_tokens / 9)
    with _sleeping_workers(short, num_engines) as workers:
        engines = TimedEngines(RayEngines(workers, deterministic=False))  # type: ignore[arg-type]
        empty_tick_s = _empty_tick_s(engines)
        collector = collector_of(short, engines, clock=time.perf_counter)
        for version in range(2):
            workers.set_version(version)
            unfinished = [s for g in collector.buffer.open_groups() for s in g.unfinished]
            resent = sum(args.prompt_tokens + sample.num_tokens for sample in unfinished)
            engines.begin()
            before_s = engines.spent_s
            collection = collector.collect(version, on_progress=lambda n, _: on_progress(n))
            calls_s = engines.spent_s - before_s
        stats = collection.stats
        return RayCost(
            ticks=engines.num_ticks,
            tokens=resent + stats.generated_tokens,
            rollout_s=stats.time_s,
            calls_s=calls_s,
            empty_tick_s=empty_tick_s,
            stop_s=stats.stop_s,
        )


def _empty_tick_s(engines: TimedEngines) -> float:
    """CPU seconds of a tick that has nothing to do, two under way on every engine."""
    ended = 0
    for engine in [*range(engines.num_engines)] * 2:
        engines.launch(engine, [], slots=1, max_steps=1)
    before_s = engines.spent_s
    while ended < _EMPTY_TICKS:
        for engine, _ in engines.wait(_PATIENCE_S):
            engines.launch(engine, [], slots=1, max_steps=1)
            ended += 1
    spent_s = engines.spent_s - before_s
    engines.abort(_PATIENCE_S)
    return spent_s / ended


@contextmanager
def _sleeping_workers(args: argparse.Namespace, num_engines: int) -> Iterator[SleepingWorkers]:
    """Embedded Ray and its actors, and nothing left of them."""
    start_ray(num_workers=num_engines, address=None)
    with tempfile.TemporaryDirectory() as folder:
        workers = SleepingWorkers(args, num_engines, folder=Path(folder))
        try:
            yield workers
        finally:
            workers.end()
            stop_ray()
