"""Traces of whole steps: the controller's phases and the first worker's calls."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from april_rl.run.tracking.tracker import Tracker

if TYPE_CHECKING:
    from april_rl.training.runtime.workers import Workers


class StepProfiler:
    """Writes profile/step_N/ for the steps of `profiler.steps`."""

    def __init__(
        self, steps: Sequence[int], workers: Workers, tracker: Tracker, run_dir: Path
    ) -> None:
        self._steps, self._workers, self._tracker = steps, workers, tracker
        self._folder = run_dir.resolve() / "profile"

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Trace the step in the context if it should be traced."""
        if step not in self._steps:
            yield
            return
        folder = self._folder / f"step_{step:05d}"
        shutil.rmtree(folder, ignore_errors=True)  # the run may pass this step a second time
        folder.mkdir(parents=True)
        began_ns = time.time_ns()
        self._workers.start_profile(folder)
        yield
        with self._tracker.phase("writing the profile"):
            self._workers.write_profile()
            ended = self._tracker.phases
            phases = [each._asdict() for each in ended if each.began_ns >= began_ns]
            (folder / "phases.json").write_text(json.dumps(phases))
        self._tracker.message(f"profile: {folder}; the report makes a trace of it")
