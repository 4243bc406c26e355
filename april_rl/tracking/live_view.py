"""The live terminal view: finished steps scroll above a panel of the phase and the figures."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from april_rl.tracking import figures
from april_rl.tracking.samples_file import SampleRecord
from april_rl.tracking.terminal import Phase

_HEADING_EVERY = 20  # lines
_MIN_BAR, _CELL = (
    8,
    27,
)  # columns: the narrowest sparkline; label and number of a figure with their gaps
_REFRESH_HZ = 4


class LiveView:
    """Owns the terminal until it is closed; what others print to stdout appears above the panel."""

    def __init__(self, *, title: str, num_steps: int, console: Console | None = None) -> None:
        """Starts the view on `console`; None: stdout."""
        self._console = console or Console()
        self._title = title
        self._num_steps = num_steps
        self._started_s = time.monotonic()
        self._step = 0
        self._lines = 0
        self._ends_s: float | None = None  # on the monotonic clock
        self._phases: list[Phase] = []
        self._history: dict[str, list[float]] = {}
        self._texts: dict[str, str] = {}
        self._live = Live(
            console=self._console, get_renderable=self.panel, refresh_per_second=_REFRESH_HZ
        )
        self._live.start()

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        """The phase; the innermost one is shown."""
        phase = Phase(name, total)
        self._phases.append(phase)
        try:
            yield phase
        finally:
            self._phases.remove(phase)

    def step(self, step: int, values: Mapping[str, float], *, left_s: float | None) -> None:
        """A line above the panel, and the panel's figures."""
        self._step = step
        self._ends_s = None if left_s is None else time.monotonic() + left_s
        for figure in figures.FIGURES:
            if figure.key in values:
                self._remember(figure.label, values[figure.key], figures.written(figure, values))
        for name, average in figures.accuracies(values).items():
            self._remember(f"{name} avg@k", average, f"{average:.3f}")
        if figures.is_trained(values):
            self._print_line(step, values, left_s=left_s)
        for line in figures.evaluation_lines(step, values):
            self._console.print(Text(line, style="green"))
        self._live.refresh()

    def message(self, text: str) -> None:
        """The text above the panel."""
        self._console.print(Text(text, style="yellow"))

    def samples(self, step: int, records: Sequence[SampleRecord]) -> None:
        """Each sample in a frame above the panel."""
        for record in records:
            text = figures.sample_text(step, record, width=self._console.width - 4)
            self._console.print(Panel(Text(text), border_style="dim"))

    def close(self) -> None:
        """The panel stays as it is, the cursor comes back."""
        self._live.stop()

    def panel(self) -> RenderableType:
        """The panel as of now: the run, the phase, and the figures with their course."""
        width = self._console.width
        parts: list[RenderableType] = [self._progress()]
        if self._texts:
            parts += [Text(), self._figures(width - 4)]
        return Panel(
            Group(*parts),
            title=Text(self._title, style="bold"),
            title_align="left",
            border_style="dim",
        )

    def _print_line(self, step: int, values: Mapping[str, float], *, left_s: float | None) -> None:
        """The step's line, under headings now and then."""
        if self._lines % _HEADING_EVERY == 0:
            self._console.print(Text(figures.heading(), style="dim"))
        if self._lines == 0:
            self._console.print(Text(figures.LEGEND, style="dim"))
        self._lines += 1
        self._console.print(Text(figures.step_line(step, values, left_s=left_s)))

    def _remember(self, label: str, value: float, text: str) -> None:
        """Show `text` behind `label`, and `value` at the end of its sparkline."""
        self._history.setdefault(label, []).append(value)
        self._texts[label] = text

    def _progress(self) -> Table:
        """The bar of the phase under way, if there is one, and the bar of the run."""
        grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(justify="right", no_wrap=True)
        grid.add_column(no_wrap=True, min_width=24)
        for phase in self._phases[-1:]:
            grid.add_row(*_phase_row(phase))
        now_s = time.monotonic()
        left = (
            ""
            if self._ends_s is None
            else f", {figures.duration(max(0, self._ends_s - now_s))} left"
        )
        grid.add_row(
            "run",
            ProgressBar(total=self._num_steps, completed=self._step),
            f"{self._step}/{self._num_steps}",
            f"{figures.duration(now_s - self._started_s)}{left}",
        )
        return grid

    def _figures(self, width: int) -> Table:
        """The figures in two columns, each with a sparkline as wide as there is room."""
        bar = max(_MIN_BAR, width // 2 - _CELL)
        grid = Table.grid(padding=(0, 2, 0, 0))
        for _ in range(2):
            grid.add_column(
                no_wrap=True, min_width=15, max_width=15, overflow="ellipsis", style="dim"
            )
            grid.add_column(no_wrap=True, min_width=7, justify="right", style="bold")
            grid.add_column(no_wrap=True, min_width=bar, max_width=bar, style="cyan")
        labels = dict.fromkeys(figure.label for figure in figures.FIGURES) | self._texts
        cells = [
            (label, text, figures.sparkline(self._history[label], bar))
            for label, text in labels.items()
            if text is not None
        ]
        for left, right in zip(cells[::2], [*cells[1::2], ("", "", "")], strict=False):
            grid.add_row(*left, *right)
        return grid


def _phase_row(phase: Phase) -> tuple[RenderableType, ...]:
    """Name, bar, count, and note with elapsed time; the bar pulses when there is no known end."""
    note = f"{phase.note}, " if phase.note else ""
    return (
        Text(phase.name, style="bold"),
        ProgressBar(total=phase.total, completed=phase.done, pulse=phase.total is None),
        "" if phase.total is None else f"{phase.done}/{phase.total}",
        f"{note}{figures.duration(phase.elapsed_s)}",
    )
