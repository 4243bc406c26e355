"""Copy rows of a source to a file from which the same settings read the same prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from april_rl.config.task import TASK_PREFIX, PromptSetConfig
from april_rl.errors import DataError
from april_rl.task.data.json_rows import to_public_types
from april_rl.task.data.sources import open_source, quiet


class UnwritableError(DataError):
    """Rows would change when written as JSON; Parquet keeps their types."""


def copy_rows(
    chosen: PromptSetConfig, rows: Sequence[int], target: Path, *, key: str, seed: int
) -> None:
    """Write the rows with these indices, with all their columns and unrendered, to `target`, a
    .jsonl or .parquet file. Raise DataError and OSError.

    The other arguments are those of `open_source`.
    """
    with TemporaryDirectory() as folder, quiet():
        table = open_source(chosen, key=key, seed=seed, folder=Path(folder)).table.select(rows)
        if target.suffix == ".parquet":
            to_public_types(table).to_parquet(str(target))
        else:
            _write_lines(table, target)


def _write_lines(table: Iterable[object], target: Path) -> None:
    try:
        with target.open("w", encoding="utf-8") as file:
            for row in table:
                file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
    except (TypeError, ValueError) as error:
        raise UnwritableError(f"JSON cannot hold a value of these rows ({error})") from error


def write_sampled_rows(
    chosen: PromptSetConfig, path: Path, *, key: str, num_rows: int
) -> Path | None:
    """Write at most `num_rows` evenly spaced rows to the .jsonl file `path`, and return it.

    Return None for a procedural task, whose rows are drawn, not read. Raise DataError, which names
    the setting `key`.
    """
    if chosen.path.startswith(TASK_PREFIX):
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as work:
        rows = open_source(chosen, key=key, seed=0, folder=Path(work)).table
        places = np.linspace(0, len(rows) - 1, min(num_rows, len(rows))).astype(int)
        with quiet():
            _write_lines(rows.select(places), path)
    return path
