"""Restart a run in the same process after it lost a worker, and say from which checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from april_rl.errors import EngineStalledError
from april_rl.metrics import Metrics, Sum
from april_rl.run.checkpointing.resume import AUTO
from april_rl.run.supervision.failures import WorkerDiedError, WorkerMemoryError


class Run(Protocol):
    """The facts about a run that a restart needs."""

    @property
    def version(self) -> int:
        """Return the policy version, counted in steps."""

    @property
    def last_checkpoint(self) -> Path | None:
        """Return the checkpoint that the run wrote last, or else the one it resumed from."""


class Restarts:
    """Counts restarts, and decides which checkpoint the run resumes from: at first the checkpoint
    that `resume` names, later the last one of the run itself. Each restart rebuilds the whole run,
    because no worker state survives a failure.
    """

    def __init__(self, most: int, *, resume: str | None) -> None:
        self._resume = resume  # the checkpoint to resume next: a path, auto, or None for a new run
        self._left, self._most = most, most
        self._lives_on = True
        self._run: Run | None = None  # None before it is built
        self._began_at = 0  # policy version at which the run was built
        self._failed_s: float | None = None  # time of the last failure

    def lives(self) -> Iterator[str | None]:
        """Yield the checkpoint to resume: at the start, and after each suppressed failure."""
        while self._lives_on:
            self._lives_on = False
            yield self._resume

    def begin(self, run: Run) -> None:
        self._run, self._began_at = run, run.version

    @contextmanager
    def suppress_failure(self) -> Iterator[None]:
        """Suppress the failure of a worker if the run may restart; let any other error pass.

        The run does not restart if it was never built, made no step since the last restart, or ran
        out of memory, because it would fail again.
        """
        self._run = None
        try:
            yield
        except WorkerMemoryError:
            raise
        except (WorkerDiedError, EngineStalledError) as error:
            run, is_restart = self._run, self._left < self._most
            if run is None or not self._left or (is_restart and run.version <= self._began_at):
                raise
            self._left -= 1
            self._failed_s = time.monotonic()
            path = run.last_checkpoint
            self._resume = AUTO if path is None else str(path)
            self._lives_on = True
            how = "there is no checkpoint yet, it starts again" if path is None else f"from {path}"
            print(
                f"{error}\nrestart {self._most - self._left} of runtime.max_restarts="
                f"{self._most}: {how}",
                flush=True,
            )

    def metrics(self) -> Metrics:
        """Return the number of restarts and, after one, the seconds since the failure."""
        if self._failed_s is None:
            return Metrics()
        lost_s = time.monotonic() - self._failed_s
        return Metrics(
            {"restart/count": Sum(self._most - self._left), "restart/lost_s": Sum(lost_s)}
        )
