"""Plain lines for logs and pipes: one aligned line a step, and a sign of life from long phases."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from april_rl.tracking import figures
from april_rl.tracking.samples_file import SampleRecord
from april_rl.tracking.terminal import Phase

_HEADING_EVERY = 20  # lines
_REPEAT = 6  # patiences between two lines of one phase
_WIDTH = 100


class PlainView:
    """Prints to stdout, a line at a time, flushed."""

    def __init__(self, *, title: str, patience_s: float = 10.0) -> None:
        """Prints the title. A phase gets a line after `patience_s`, then every 6 · `patience_s`."""
        self._patience_s = patience_s
        self._lines = 0
        self._print(title)

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        """The phase; its lines come from a thread, so that a blocking call shows life too."""
        phase = Phase(name, total)
        is_over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(phase, is_over), daemon=True)
        watch.start()
        try:
            yield phase
        finally:
            is_over.set()
            watch.join()

    def step(self, step: int, values: Mapping[str, float], *, left_s: float | None) -> None:
        """One line for the step, one for each evaluation set."""
        if figures.is_trained(values):
            if self._lines % _HEADING_EVERY == 0:
                self._print(figures.heading())
            if self._lines == 0:
                self._print(figures.LEGEND)
            self._lines += 1
            self._print(figures.step_line(step, values, left_s=left_s))
        for line in figures.evaluation_lines(step, values):
            self._print(line)

    def message(self, text: str) -> None:
        """The text on lines of its own."""
        self._print(text)

    def samples(self, step: int, records: Sequence[SampleRecord]) -> None:
        """Each sample as an indented block."""
        for record in records:
            self._print(figures.sample_text(step, record, width=_WIDTH))

    def close(self) -> None:
        """Nothing to restore."""

    def _watch(self, phase: Phase, is_over: threading.Event) -> None:
        """Print a line for the phase when it takes long, until it is over."""
        wait_s = self._patience_s
        while not is_over.wait(wait_s):
            self._print(_phase_line(phase))
            wait_s = _REPEAT * self._patience_s

    def _print(self, text: str) -> None:
        """One write, flushed, so that lines of two threads do not mix."""
        print(text + "\n", end="", flush=True)


def _phase_line(phase: Phase) -> str:
    """Such as `       rollout: 5 of 16, 18,203 tokens/s, 12s so far`."""
    counted = f"{phase.done} of {phase.total}" if phase.total is not None else ""
    parts = (counted, phase.note, f"{figures.duration(phase.elapsed_s)} so far")
    return f"        {phase.name}: {', '.join(part for part in parts if part)}"
