"""Restart a run from its last checkpoint, in the same process, after it lost a worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from april_rl.metrics import Metrics, Sum
from april_rl.rollout.ports import EngineStalledError
from april_rl.runtime.supervision.failures import WorkerDiedError, WorkerMemoryError


class Restarts:
    """Counts restarts. Each rebuilds the whole run, because no worker state survives a failure."""

    def __init__(self, most: int) -> None:
        """Allow at most `most` restarts."""
        self._left, self._most = most, most
        self._version: Callable[[], int] | None = None  # None before the run begins
        self._failed_at = -1  # policy version at the previous failure
        self._failed_s: float | None = None  # time of the last failure

    def begin(self, version: Callable[[], int]) -> None:
        """Note that the run has been built; `version` returns its current policy version."""
        self._version = version

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Suppress the failure of a worker if the run may restart; let any other error pass.

        The run does not restart if it was never built, made no step since the previous failure, or
        ran out of memory, because it would fail again.
        """
        self._version = None
        try:
            yield
        except WorkerMemoryError:
            raise
        except (WorkerDiedError, EngineStalledError) as error:
            if self._version is None or not self._left or self._version() <= self._failed_at:
                raise
            self._left -= 1
            self._failed_at, self._failed_s = self._version(), time.monotonic()
            print(
                f"{error}\nrestart {self._most - self._left} of runtime.max_restarts="
                f"{self._most}: resuming from the last checkpoint",
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
