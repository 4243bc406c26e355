"""The time a run still takes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_STEPS = 20  # the pace is the mean of so many steps


class Pace:
    """The time left, by the clock between steps: evaluations and checkpoints count."""

    def __init__(self, num_steps: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._num_steps = num_steps
        self._clock = clock
        self._times: deque[tuple[int, float]] = deque(maxlen=_STEPS + 1)  # (step, seconds)

    def left_s(self, step: int, *, step_s: float | None) -> float | None:
        """Seconds until the last step is done, now that `step` is; None while nothing is known.

        `step_s`, what the step says it took, serves until a second step is done.
        """
        self._times.append((step, self._clock()))
        (first, first_s), (last, last_s) = self._times[0], self._times[-1]
        pace_s = (last_s - first_s) / (last - first) if last > first else step_s
        return None if pace_s is None else pace_s * max(0, self._num_steps - step)
