"""Axes beside the step that a run is compared over: trained tokens and time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from april_rl.tracking.keys import RUN_TIME, TRAINED_TOKENS

_TRAINED = "throughput/trained_tokens"


class Axes:
    """Trained tokens and seconds since a run began; a run that goes on counts on from its last
    row.
    """

    def __init__(
        self, last_row: Mapping[str, float | None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Count on from `last_row`, which is empty for a new run."""
        self._clock = clock
        self._tokens = last_row.get(TRAINED_TOKENS) or 0.0
        self._began = clock() - (last_row.get(RUN_TIME) or 0.0)

    def advance(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the axes at the end of the step with these metrics."""
        self._tokens += values.get(_TRAINED, 0.0)
        return {TRAINED_TOKENS: self._tokens, RUN_TIME: self._clock() - self._began}
