"""What a run shows while it runs, as a protocol: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console

from april_rl.tracking.samples_file import SampleRecord

# Set by Jupyter for what a notebook starts. A notebook shows the pseudo-terminal of `!command`, but
# moves no cursor.
_NOTEBOOK = "JPY_PARENT_PID"


def can_redraw(console: Console) -> bool:
    """Return whether `console` is a terminal that can overwrite what it shows.

    rich's `is_terminal` is also true of pipes where FORCE_COLOR is set, as CI services do.
    """
    is_terminal = console.file.isatty() and not console.is_dumb_terminal
    return is_terminal and _NOTEBOOK not in os.environ


@dataclass(slots=True)
class Phase:
    """A stretch of the run that takes time: loading, rollout; `total` None: no known end."""

    name: str
    total: int | None = None
    done: int = 0
    note: str = ""
    started_s: float = field(default_factory=time.monotonic)

    def advance(self, done: int, note: str = "") -> None:
        """Say that `done` of `total` are there by now; `note` is shown beside it."""
        self.done = done
        self.note = note

    @property
    def elapsed_s(self) -> float:
        """Seconds since the phase began."""
        return time.monotonic() - self.started_s


class View(Protocol):
    """Where the figures of a run are shown."""

    def phase(self, name: str, total: int | None = None) -> AbstractContextManager[Phase]:
        """The phase that is under way while the context is open; phases may nest."""

    def step(self, step: int, values: Mapping[str, float], *, left_s: float | None) -> None:
        """Show the metrics of a step; `left_s` is what the run still takes, None: unknown."""

    def message(self, text: str) -> None:
        """Show a line that concerns the person who runs this."""

    def samples(self, step: int, records: Sequence[SampleRecord]) -> None:
        """Show these samples."""

    def close(self) -> None:
        """Leave the terminal as it was found."""
