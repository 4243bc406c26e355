"""Traces of whole steps: the controller's phases and the workers' calls on one clock."""

from __future__ import annotations

import gzip
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from april_rl.config.profiler import ProfilerConfig
from april_rl.runtime.call_profiler import (
    Event,
    named_process,
    named_thread,
    write_events,
)
from april_rl.runtime.workers import Workers
from april_rl.tracking.tracker import Tracker

_CONTROLLER = 1  # its process in the trace, above those of the workers


class StepProfiler:
    """Writes profile/step_N.trace.json.gz for the steps of `profiler.steps`."""

    def __init__(
        self, config: ProfilerConfig, workers: Workers, tracker: Tracker, run_dir: Path
    ) -> None:
        """`run_dir` is a folder that all workers see."""
        self._config, self._workers, self._tracker = config, workers, tracker
        self._folder = run_dir.resolve() / "profile"

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Trace the step in the context, if it is to be traced."""
        if step not in self._config.steps:
            yield
            return
        origin_ns = time.time_ns()
        num_workers = self._config.num_workers
        self._workers.start_profile(
            origin_ns, num_workers=num_workers, num_ticks=self._config.num_ticks
        )
        yield
        self._folder.mkdir(exist_ok=True)
        stem = self._folder / f"step_{step:05d}"
        with self._tracker.phase("writing the profile"):
            parts = self._workers.write_profile(stem, num_workers=num_workers)
            own = stem.with_suffix(".controller.gz")
            write_events(own, self._phases(origin_ns))
            target = stem.with_suffix(".trace.json.gz")
            _merge([own, *parts], target)
        self._tracker.message(f"profile: {target}; open it at ui.perfetto.dev")

    def _phases(self, origin_ns: int) -> list[Event]:
        """Return the controller's phases since the step began, as events of the trace."""
        phases: list[Event] = [
            {
                "ph": "X",
                "name": phase.name,
                "cat": "phase",
                "ts": (phase.began_ns - origin_ns) / 1e3,
                "dur": (phase.ended_ns - phase.began_ns) / 1e3,
                "pid": _CONTROLLER,
                "tid": 0,
            }
            for phase in self._tracker.phases
            if phase.began_ns >= origin_ns
        ]
        return [
            *phases,
            *named_process(_CONTROLLER, "controller"),
            named_thread(_CONTROLLER, 0, "phases"),
        ]


def _merge(parts: Sequence[Path], target: Path) -> None:
    """Make one trace of files with an event a line, and remove them."""
    with gzip.open(target, "wt", encoding="utf-8") as trace:
        trace.write('{"displayTimeUnit": "ms", "traceEvents": [')
        separator = "\n"
        for line in _lines(parts):
            trace.write(separator + line.rstrip("\n"))
            separator = ",\n"
        trace.write("\n]}\n")
    for part in parts:
        part.unlink()


def _lines(parts: Iterable[Path]) -> Iterator[str]:
    for part in parts:
        with gzip.open(part, "rt", encoding="utf-8") as lines:
            yield from lines
