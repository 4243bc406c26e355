"""metrics.jsonl: one JSON object a step, which plots, reports, tests and a resumed run read."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from april_rl.run.tracking import keys
from april_rl.run.tracking.keys import RUN_TIME, TRAINED_TOKENS


class MetricsFile:
    """Appends one object a step: `step`, then keys sorted by stage; NaN and infinity are null."""

    def __init__(self, path: Path, *, first_step: int | None = None) -> None:
        """Make the file; raises FileExistsError when it is there already: two runs would mix, and
        OSError when it cannot be written.

        A resumed run appends to its file from `first_step` on. Rows of that step and of later ones
        are removed, because it makes them again; `forgotten_step` is the last of them, `last_row`
        the last row kept.
        """
        self._path = path
        self._last_step = self.forgotten_step = -1
        self.last_row: dict[str, float | None] = {}
        if first_step is not None and path.exists():
            self.last_row, self.forgotten_step = _truncate(path, first_step)
            self._last_step = int(self.last_row["step"] or 0) if self.last_row else -1
        self._file = path.open("x" if first_step is None else "a", encoding="utf-8")

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Write a step; raise ValueError for a malformed key, or a step before the last one."""
        for key in values:
            keys.check(key)
        if step <= self._last_step:
            raise ValueError(
                f"metrics of step {step} come after the metrics of step {self._last_step}: "
                "merge the metrics of a step and log them once"
            )
        self._last_step = step
        self._file.write(_line(step, values))
        self._file.flush()

    def amend(self, step: int, values: Mapping[str, float]) -> None:
        """Add metrics to the row of the last step, or append a row; raise as `append` does, and
        for a metric that the row has already.
        """
        if step != self._last_step:
            self.append(step, values)
            return
        *others, last = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        row = json.loads(last)
        for key in values:
            keys.check(key)
            if key in row:
                raise ValueError(f"metric {key} of step {step} is logged already")
        whole = _line(step, {**row, **values})
        self._file.close()
        _replace(self._path, [*others, whole])
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Close the file, and remove it if it has no step; nothing can be appended afterwards."""
        if self._file.closed:
            return
        self._file.close()
        if self._last_step < 0:
            self._path.unlink(missing_ok=True)


def _truncate(path: Path, first_step: int) -> tuple[dict[str, float | None], int]:
    """Remove rows from `first_step` on; return the last row left, and the last step there was."""
    kept: list[str] = []
    kept_row: dict[str, float | None] = {}
    forgotten_step = -1
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            row = json.loads(line)
            step = row["step"]
        except ValueError:
            break  # the process ended while it wrote this line
        forgotten_step = step
        if step < first_step:
            kept.append(line)
            kept_row = row
    _replace(path, kept)
    return kept_row, forgotten_step


def _replace(path: Path, lines: Iterable[str]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(path)


def _line(step: int, values: Mapping[str, float | None]) -> str:
    """Return a row as a line: the step, then the keys by stage; null if not finite."""
    row: dict[str, float | None] = {"step": step}
    for key in sorted(values.keys() - {"step"}, key=keys.sort_key):
        value = values[key]
        row[key] = value if value is not None and math.isfinite(value) else None
    return json.dumps(row, allow_nan=False) + "\n"


def read_metrics(path: Path) -> list[dict[str, float | None]]:
    """Return the rows of a metrics.jsonl; raise ValueError naming a malformed line."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}:{number} is not JSON ({error.msg}): remove the line"
            ) from error
        if not isinstance(row, dict) or "step" not in row:
            raise ValueError(f"{path}:{number} is not an object with the key step: remove the line")
        rows.append(row)
    return rows


class Axes:
    """Axes other than the step: trained tokens and seconds; a resume continues the last row."""

    def __init__(
        self, last_row: Mapping[str, float | None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._tokens = last_row.get(TRAINED_TOKENS) or 0.0
        self._began = clock() - (last_row.get(RUN_TIME) or 0.0)

    def advance(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the axes at the end of the step with these metrics."""
        self._tokens += values.get("throughput/trained_tokens", 0.0)
        return {TRAINED_TOKENS: self._tokens, RUN_TIME: self._clock() - self._began}
