"""Process that simulates comparisons while the workers update."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection

from pebble import ProcessPool

from april_rl.lab.simulator.prediction import Prediction
from april_rl.lab.tuning.comparison import Comparison
from april_rl.task.processes.child_process import die_with_controller, lifeline

_NICENESS = 10  # gives way to workers and rewards without starving on a small machine


class SimulationProcess:
    """One process that predicts one comparison at a time; it starts with the first."""

    def __init__(self) -> None:
        """Prepare the pool; the process starts with the first comparison."""
        self._pool = ProcessPool(
            max_workers=1,
            initializer=partial(_prepare, lifeline()),
            # Otherwise it would be a copy of the controller.
            context=multiprocessing.get_context("spawn"),
        )

    def submit(self, comparison: Comparison) -> Future[list[Prediction]]:
        """Start a simulation and return a future for its predictions or its error."""
        predictions: Future[list[Prediction]] = self._pool.schedule(comparison.predictions)
        return predictions

    def close(self) -> None:
        """End the process now, also in the middle of a simulation."""
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join()


def _prepare(lifeline: Connection) -> None:
    die_with_controller(lifeline)
    os.nice(_NICENESS)
