"""Progress of the warm start: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from april_rl.tiny.warm_start import Progress
from april_rl.tracking.terminal import can_redraw

LINE_EVERY_S = 10.0
LOSS_MEMORY = 0.95  # decay of the exponential mean of the loss that is shown


class ProgressDisplay:
    """Shows step, loss and time left on stderr. Use it as a context manager."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._started = self._last_line = time.monotonic()
        self._loss: float | None = None
        self._bar = Bar(
            TextColumn("warm start of builtin:tiny"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not can_redraw(self._console),
        )
        self._task = self._bar.add_task("warm start", total=None, loss="")

    def __enter__(self) -> ProgressDisplay:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, progress: Progress) -> None:
        """Show a training step."""
        previous = progress.loss if self._loss is None else self._loss
        self._loss = LOSS_MEMORY * previous + (1 - LOSS_MEMORY) * progress.loss
        self._bar.update(
            self._task,
            total=progress.num_steps,
            completed=progress.step,
            loss=f"loss {self._loss:.3f}",
        )
        if not can_redraw(self._console):
            self._print_line(progress, self._loss)

    def _print_line(self, progress: Progress, loss: float) -> None:
        """Print the progress in one line if the last line is old enough or this is the last
        step.
        """
        now = time.monotonic()
        if now - self._last_line < LINE_EVERY_S and progress.step < progress.num_steps:
            return
        self._last_line = now
        left_s = (now - self._started) / progress.step * (progress.num_steps - progress.step)
        self._console.print(
            f"warm start of builtin:tiny: step {progress.step} of {progress.num_steps}, "
            f"loss {loss:.3f}, {left_s:.0f} s left",
            highlight=False,
        )
