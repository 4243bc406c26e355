"""Copy chosen rows of a source to a file, which the same settings read as the same prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from april_rl.config.task import PromptSetConfig
from april_rl.data.errors import DataError
from april_rl.data.sources import open_source, quiet


class UnwritableError(DataError):
    """Raised for rows that a JSON file would not give back as they are; Parquet keeps types."""


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
            table.to_parquet(str(target))
            return
        with target.open("w", encoding="utf-8") as file:
            for row in table:
                file.write(_line(row) + "\n")


def _line(row: object) -> str:
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UnwritableError(f"JSON cannot hold a value of these rows ({error})") from error
