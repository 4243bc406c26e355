"""Whether a run whose worker was lost goes on from its last checkpoint, in the same process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from april_rl.metrics import Metrics, Sum
from april_rl.rollout.ports import EngineStalledError
from april_rl.runtime.supervision.failures import WorkerDiedError, WorkerMemoryError


class Restarts:
    """Counts restarts. Everything is built anew: after a failure nothing of the workers is left."""

    def __init__(self, most: int) -> None:
        """Allow at most so many."""
        self._left, self._most = most, most
        self._version: Callable[[], int] | None = None  # None: the run has not begun
        self._failed_at = -1  # the version at the failure before
        self._failed_s: float | None = None  # when

    def begin(self, version: Callable[[], int]) -> None:
        """The run has been built, and is at the policy version that `version` returns."""
        self._version = version

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Swallow the failure of a worker when the run may go on; any other error passes.

        A run that cannot even be built is not tried again, nor one that has made no step since the
        failure before, nor one that lacks memory: it would again.
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
                f"{self._most}: the run goes on from its last checkpoint",
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
