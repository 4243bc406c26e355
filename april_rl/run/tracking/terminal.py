"""The output of a run: lines, and on a terminal a panel below them."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from april_rl.run.tracking import figures
from april_rl.run.tracking.figures import duration
from april_rl.run.tracking.samples_file import SampleRecord

# Jupyter sets it for programs that a notebook starts. A notebook shows the pseudo-terminal of
# `!command`, but does not move the cursor.
_NOTEBOOK = "JPY_PARENT_PID"
_BARS = "▁▂▃▄▅▆▇█"
_HEADING_EVERY = 20  # lines
_REPEAT = 6  # a phase prints a line after `patience_s`, and then every 6 · `patience_s`
_LOG_WIDTH = 100  # columns of a sample in a log
_PACE_STEPS = 20  # the time left is estimated from the mean of this many latest steps


def can_redraw(console: Console) -> bool:
    """Return whether `console` is a terminal that can overwrite what it shows.

    rich's `is_terminal` is also true of pipes where FORCE_COLOR is set, as CI services do.
    """
    is_terminal = console.file.isatty() and not console.is_dumb_terminal
    return is_terminal and _NOTEBOOK not in os.environ


@dataclass(slots=True)
class ProgressPhase:
    """A part of the run that takes time, such as a rollout; `total` None: its end is unknown."""

    name: str
    total: int | None = None
    completed: int = 0
    note: str = ""
    started_s: float = field(default_factory=time.monotonic)

    def advance(self, completed: int, note: str = "") -> None:
        """Show that `completed` of `total` are complete, with `note` next to it."""
        self.completed = completed
        self.note = note

    @property
    def time(self) -> str:
        return (
            f"{self.note + ', ' if self.note else ''}{duration(time.monotonic() - self.started_s)}"
        )


class View:
    """Prints steps, evaluations, messages and samples, a line each.

    On a terminal, a panel below shows the present phase and the history of the figures. In a
    log, a long phase prints a line now and then.
    """

    def __init__(
        self,
        *,
        title: str,
        num_steps: int,
        terminal: Console | None = None,
        patience_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title, self._num_steps = title, num_steps
        self._terminal = terminal
        self._patience_s = patience_s
        self._clock, self._started_s = clock, clock()
        self._completed, self._num_lines = 0, 0
        self._times: deque[tuple[int, float]] = deque(maxlen=_PACE_STEPS + 1)  # (step, seconds)
        self._ends_s: float | None = None  # expected end, by `clock`
        self._phases: list[ProgressPhase] = []
        self._courses: defaultdict[str, list[float]] = defaultdict(list)
        self._live: Live | None = None
        if terminal is None:
            self._print(title)
        else:
            self._live = Live(console=terminal, get_renderable=self.panel, refresh_per_second=4)
            self._live.start()

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[ProgressPhase]:
        """Show the phase while the context is open; the panel shows the innermost phase."""
        phase, is_over = ProgressPhase(name, total), threading.Event()
        self._phases.append(phase)
        if self._live is None:
            threading.Thread(target=self._repeat, args=(phase, is_over), daemon=True).start()
        try:
            yield phase
        finally:
            is_over.set()
            self._phases.remove(phase)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Print a line for the metrics of a step if it trained, and one for each evaluated set."""
        self._remember(step, values)
        if figures.is_trained(values):
            if self._num_lines % _HEADING_EVERY == 0:
                self._print(figures.HEADING, style="dim")
            if self._num_lines == 0:
                self._print(figures.LEGEND, style="dim")
            self._num_lines += 1
            left_s = self._left_s(step, values.get("time/step_s"))
            self._print(figures.step_line(step, values, left_s=left_s))
        for line in figures.evaluation_lines(values):
            self._print(f"{step:>6}  {line}", style="green")

    def evaluation(self, num_completed: int, values: Mapping[str, float]) -> None:
        """Print a line for each set evaluated outside training; `num_completed` are complete."""
        self._remember(num_completed, values)
        for line in figures.evaluation_lines(values):
            self._print(line, style="green")

    def message(self, text: str) -> None:
        self._print(text, style="yellow")

    def samples(self, step: int, records: Sequence[SampleRecord]) -> None:
        """Print each sample as an indented block."""
        width = self._terminal.width if self._terminal else _LOG_WIDTH
        for record in records:
            self._print(figures.sample_text(step, record, width=width))

    def close(self) -> None:
        """Leave the panel on the screen and restore the cursor."""
        if self._live is not None:
            self._live.stop()

    def panel(self) -> Panel:
        """Return the panel as of now."""
        grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(justify="right", no_wrap=True)
        grid.add_column(no_wrap=True, min_width=24)
        for row in self._rows():
            grid.add_row(*row)
        title = Text(self._title, style="bold")
        return Panel(grid, title=title, title_align="left", border_style="dim")

    def _print(self, text: str, style: str = "") -> None:
        if self._terminal is None:
            # Written in one call, so that lines of two threads do not mix.
            print(text + "\n", end="", flush=True)
        else:
            # The terminal wraps long lines: a command can be copied from it as it was printed.
            self._terminal.print(Text(text, style=style), soft_wrap=True)

    def _repeat(self, phase: ProgressPhase, is_over: threading.Event) -> None:
        """Print a line for the phase now and then, until it is over."""
        wait_s = self._patience_s
        while not is_over.wait(wait_s):
            count = "" if phase.total is None else f"{phase.completed} of {phase.total}, "
            self._print(f"        {phase.name}: {count}{phase.time} so far")
            wait_s = _REPEAT * self._patience_s

    def _remember(self, completed: int, values: Mapping[str, float]) -> None:
        self._completed = completed
        for label, value in figures.courses(values).items():
            self._courses[label].append(value)

    def _left_s(self, step: int, step_s: float | None) -> float | None:
        """Return the seconds until the last step ends, by the pace between the last steps."""
        self._times.append((step, self._clock()))
        (first, first_s), (last, last_s) = self._times[0], self._times[-1]
        pace_s = (last_s - first_s) / (last - first) if last > first else step_s
        left_s = None if pace_s is None else pace_s * max(0, self._num_steps - step)
        self._ends_s = None if left_s is None else last_s + left_s
        return left_s

    def _rows(self) -> Iterator[tuple[RenderableType, ...]]:
        for phase in self._phases[-1:]:
            yield Text(phase.name, style="bold"), *_bar(phase.completed, phase.total), phase.time
        now_s = self._clock()
        left = "" if self._ends_s is None else f", {duration(max(0, self._ends_s - now_s))} left"
        time_s = duration(now_s - self._started_s)
        yield "run", *_bar(self._completed, self._num_steps), f"{time_s}{left}"
        for label, course in self._courses.items():
            yield Text(label), _Sparkline(course), f"{course[-1]:.3f}"


def _bar(completed: int, total: int | None) -> tuple[ProgressBar, str]:
    bar = ProgressBar(total=total, completed=completed, pulse=total is None)
    return bar, "" if total is None else f"{completed}/{total}"


class _Sparkline(NamedTuple):
    """Bars of the last values, as many as there is room for."""

    values: Sequence[float]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(sparkline(self.values, options.max_width), style="cyan")


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the last `width` finite values as bars from their smallest to their largest."""
    shown = [value for value in values if math.isfinite(value)][-width:]
    if not shown:
        return ""
    low, span = min(shown), max(shown) - min(shown)
    top = len(_BARS) - 1
    return "".join(_BARS[round((value - low) / span * top) if span > 0 else 0] for value in shown)
