"""metrics.jsonl: one JSON object a step; what plots, reports, tests and a resumed run read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from april_rl.tracking import keys


class MetricsFile:
    """Appends one object a step: `step`, then keys sorted by stage; NaN and infinity are null."""

    def __init__(self, path: Path) -> None:
        """Makes the file; raises FileExistsError when it is there already: two runs would mix, and
        OSError when it cannot be written.
        """
        self._path = path
        self._file = path.open("x", encoding="utf-8")
        self._last_step = -1

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Write a step to the disk.

        Raises ValueError for a malformed key, or a step that does not come after the last one.
        """
        for key in values:
            keys.check(key)
        if step <= self._last_step:
            raise ValueError(
                f"metrics of step {step} come after those of step {self._last_step}: "
                "merge the metrics of a step and log them once"
            )
        self._last_step = step
        row: dict[str, float | None] = {"step": step}
        for key in sorted(values, key=keys.sort_key):
            row[key] = values[key] if math.isfinite(values[key]) else None
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Nothing can be appended afterwards; a file without a step is taken away again."""
        if self._file.closed:
            return
        self._file.close()
        if self._last_step < 0:
            self._path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        """The file itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the file."""
        self.close()


def read_metrics(path: Path) -> list[dict[str, float | None]]:
    """The objects of a metrics.jsonl in the order they were written.

    Raises ValueError naming the file and the line when a line is not a JSON object with a step.
    """
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
