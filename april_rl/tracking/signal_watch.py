"""Steps without a signal: all rewards of each group are equal, so nothing is learned."""

from __future__ import annotations

NUM_SILENT = 3  # consecutive steps without a signal that are worth a message


class SignalWatch:
    """Consecutive steps, up to the last one, in which no group has a signal."""

    def __init__(self) -> None:
        self.num_steps = self._since = 0

    def add(self, step: int, no_signal_frac: float) -> None:
        """Count a step by its `reward/no_signal_frac`."""
        is_silent = no_signal_frac >= 1
        self._since = self._since if self.num_steps else step
        self.num_steps = self.num_steps + 1 if is_silent else 0

    @property
    def advice(self) -> str:
        """Return advice on what to do about such steps."""
        return (
            f"No group has a signal since step {self._since}: all rewards of a group are equal, so "
            "nothing is learned. Use easier or harder prompts, or another reward."
        )
