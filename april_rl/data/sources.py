"""Where rows come from: a file, a Hugging Face data set, or a procedural task, as an Arrow table
that is mapped into memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
from numpy.typing import NDArray

from april_rl.config.task import PromptSetConfig
from april_rl.data import procedural
from april_rl.data.errors import DataError
from april_rl.data.hub import load_split
from april_rl.data.json_faults import check_readable, check_text, json_fault

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_NOISY_LOGGERS = ("datasets", "huggingface_hub")  # both report what is raised as well


@dataclass(frozen=True, slots=True, kw_only=True)
class RowNames:
    """What messages call a row: `file:line`, or set and row."""

    prefix: str  # "file:" before a line, otherwise "file row " or "set [split] row "
    lines: NDArray[np.int64] | None = None  # [rows] of a file with one object a line

    def name(self, row: int) -> str:
        """Return the name of the row, counted from 0."""
        number = row + 1 if self.lines is None else int(self.lines[row])
        return f"{self.prefix}{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RawTable:
    """A table as its source has it, with at least one row."""

    table: datasets.Dataset
    names: RowNames
    where: str  # setting and path, for messages


def is_file(path: str) -> bool:
    """Return whether the path is a file and not the id of a data set or a task."""
    return Path(path).suffix in FORMATS or Path(path).is_file()


def open_source(chosen: PromptSetConfig, *, key: str, seed: int, folder: Path) -> RawTable:
    """Return the rows of a set; raises DataError.

    A .jsonl, .json or .parquet file is copied into an Arrow file in `folder`, which must live as
    long as the table. A data set id is in the Hugging Face cache; a third part of it is its
    configuration. `seed` is of the questions of a procedural task.
    """
    path = chosen.path
    if is_file(path):
        table = _load_file(path, where=f"{key}={path}", cache=folder)
    elif path.startswith(procedural.PREFIX):
        columns = procedural.draw_rows(
            path, key=key, split=chosen.split, args=chosen.args, seed=seed
        )
        table = datasets.Dataset.from_dict(columns)
    else:
        table = load_id(path, key=key, split=chosen.split)
    if not len(table):
        raise DataError(f"{key}={path}: there are no rows in it")
    return RawTable(table=table, names=row_names(chosen, len(table)), where=f"{key}={path}")


def row_names(chosen: PromptSetConfig, num_rows: int) -> RowNames:
    """Return `file:line` for a file with one object a line, otherwise file or set and row."""
    path = chosen.path
    if not is_file(path):
        return RowNames(prefix=f"{path} [{chosen.split}] row ")
    if FORMATS[Path(path).suffix] == "json":
        with Path(path).open("rb") as file:
            lines = [number for number, line in enumerate(file, start=1) if line.strip()]
        if len(lines) == num_rows:
            return RowNames(prefix=f"{path}:", lines=np.array(lines, dtype=np.int64))
    return RowNames(prefix=f"{path} row ")


def _load_file(path: str, *, where: str, cache: Path) -> datasets.Dataset:
    """Return the file as a table with at least one row."""
    builder = FORMATS.get(Path(path).suffix)
    if builder is None:
        raise DataError(f"{where}: a data file must end in {', '.join(FORMATS)}")
    is_text = builder == "json"
    check_readable(path, where=where)
    if is_text:
        check_text(path, where=where)
    try:
        with quiet():
            return datasets.load_dataset(
                builder, data_files=path, split="train", cache_dir=str(cache)
            )
    except datasets.exceptions.DatasetsError as error:
        reason = json_fault(path, where=where) if is_text else None
        raise DataError(reason or f"{where}: {_root_cause(error)}") from error
    except ValueError as error:  # how the library says that a JSON file has no rows
        hint = " Are there rows in it?" if is_text else ""
        raise DataError(f"{where}: {_root_cause(error)}{hint}") from error


def load_id(path: str, *, key: str, split: str) -> datasets.Dataset:
    """Return one split of a Hugging Face data set, of one of its configurations where named."""
    try:
        with quiet():
            return load_split(path, split=split)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise DataError(
            f"{key}={path} (data.split={split}): neither a .jsonl, .json or .parquet file "
            f"nor a data set that can be loaded: {_root_cause(error, num_lines=2)}"
        ) from error


def _root_cause(error: BaseException, *, num_lines: int = 1) -> str:
    """Return the first lines of the innermost error, which says more than the outer ones."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join((str(error).strip() or type(error).__name__).splitlines()[:num_lines])


def mapped_anew(table: datasets.Dataset) -> datasets.Dataset:
    """Return the table on a fresh mapping of its files: what was read through the old one counts as
    memory of the process until nobody uses that.
    """
    files = [str(entry["filename"]) for entry in table.cache_files]
    if not files:
        return table
    anew = datasets.concatenate_datasets([datasets.Dataset.from_file(name) for name in files])
    return anew if len(anew) == len(table) else table  # a part of the files, such as train[:10%]


@contextmanager
def quiet() -> Iterator[None]:
    """Show no progress bars of `datasets`, and no log lines about what is raised anyway."""
    levels = {name: logging.getLogger(name).level for name in _NOISY_LOGGERS}
    bars_were_on = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if bars_were_on:
            datasets.enable_progress_bars()
