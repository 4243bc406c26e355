"""Data files: which paths name one, and what is checked before anything heavy is imported."""

from __future__ import annotations

from pathlib import Path

from april_rl.config import TrainConfig
from april_rl.data.errors import DataError

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def is_file(path: str) -> bool:
    """Return whether the path names a file, not a data set id or a procedural task."""
    return Path(path).suffix in FORMATS or Path(path).is_file()


def check_files(config: TrainConfig) -> None:
    """Raise DataError for a data file that is missing, empty, or of another kind."""
    sources = {f"data.sources.{name}.path": one.path for name, one in config.data.sources.items()}
    for key, path in (sources or {"data.path": config.data.path}).items():
        if is_file(path):
            check_file(path, where=f"{key}={path}")
    for name, held_out in config.evaluation.sets.items():
        key = f"evaluation.sets.{name}"
        if is_file(held_out.path):
            try:
                check_file(held_out.path, where=f"{key}.path={held_out.path}")
            except DataError as error:
                raise DataError(f"{error}; {key}=null leaves it out") from error


def check_file(path: str, *, where: str) -> None:
    """Raise DataError unless the file has a known ending, may be read, and is not empty."""
    if Path(path).suffix not in FORMATS:
        raise DataError(f"{where}: a data file must end in {', '.join(FORMATS)}")
    try:
        with Path(path).open("rb") as file:
            is_empty = not file.read(1)
    except OSError as error:
        raise DataError(f"{where}: cannot be read: {error.strerror}") from error
    if is_empty:
        raise DataError(f"{where}: the file is empty")
