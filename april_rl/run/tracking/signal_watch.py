"""Steps without a signal: all rewards of each group are equal, so nothing is learned."""

from __future__ import annotations

from april_rl.config.choices import SAMPLE_BY_SAMPLE

NUM_SILENT = 3  # consecutive steps without a signal before it is worth saying


class SignalWatch:
    """Consecutive steps, up to the last one, in which no group has a signal."""

    def __init__(self, advantage: object) -> None:
        """Count steps of a run; none if `advantage` does not compare samples of a group."""
        self.num_steps = self._since = 0
        self._compares = advantage not in SAMPLE_BY_SAMPLE

    def add(self, step: int, no_signal_frac: float) -> None:
        """Count a step by its `reward/no_signal_frac`."""
        is_silent = self._compares and no_signal_frac >= 1
        self._since = self._since if self.num_steps else step
        self.num_steps = self.num_steps + 1 if is_silent else 0

    @property
    def advice(self) -> str:
        return (
            f"No group has a signal since step {self._since}: all rewards of a group are equal, so "
            "nothing is learned. Use easier or harder prompts, or another reward."
        )
