"""Open a file, a Hugging Face data set or a procedural task as a memory-mapped Arrow table."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
from numpy.typing import NDArray

from april_rl.config.task import TASK_PREFIX, PromptSetConfig
from april_rl.errors import DataError
from april_rl.task.data.files import FORMATS, check_file, is_file
from april_rl.task.data.json_faults import json_fault
from april_rl.task.data.json_rows import read_json
from april_rl.task.data.procedural import draw_rows

# The error of `datasets` when a set has several configurations and none was named.
_SEVERAL = re.compile(r"Config name is missing.*available configs: (\[.*?\])", re.DOTALL)
_NOISY_LOGGERS = ("datasets", "huggingface_hub")  # both also log the errors that they raise


@dataclass(frozen=True, slots=True, kw_only=True)
class RowNames:
    """Names of rows for messages: `file:line`, or set and row."""

    prefix: str  # "file:" if each line is a row, otherwise "file row " or "set [split] row "
    lines: NDArray[np.int64] | None = None  # line numbers [rows] of a file with one object a line

    def name(self, row: int) -> str:
        """Return the name of a row; rows count from 0."""
        number = row + 1 if self.lines is None else int(self.lines[row])
        return f"{self.prefix}{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RawTable:
    """The rows of a source before any processing; at least one."""

    table: datasets.Dataset
    names: RowNames
    where: str  # "setting=path", for messages


def open_source(chosen: PromptSetConfig, *, key: str, seed: int, folder: Path) -> RawTable:
    """Return the rows of a set; raises DataError.

    A .jsonl, .json or .parquet file is converted to an Arrow file in `folder`, which must live as
    long as the table. A data set id is loaded into the Hugging Face cache; `seed` draws the
    questions of a procedural task.
    """
    path = chosen.path
    if is_file(path):
        table = _load_file(path, where=f"{key}={path}", cache=folder)
    elif path.startswith(TASK_PREFIX):
        table = datasets.Dataset.from_dict(draw_rows(chosen, key=key, seed=seed))
    else:
        table = load_id(path, key=key, split=chosen.split)
    if not len(table):
        raise DataError(f"{key}={path} has no rows")
    return RawTable(table=table, names=row_names(chosen, len(table)), where=f"{key}={path}")


def row_names(chosen: PromptSetConfig, num_rows: int) -> RowNames:
    """Return names such as file:line if each line is an object, else with row numbers."""
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
    check_file(path, where=where)
    builder = FORMATS[Path(path).suffix]
    is_text = builder == "json"
    try:
        if is_text:
            return read_json(path, cache / "rows.arrow")
        with quiet():
            return datasets.load_dataset(
                builder, data_files=path, split="train", cache_dir=str(cache)
            )
    except (datasets.exceptions.DatasetsError, ValueError) as error:
        reason = json_fault(path, where=where) if is_text else None
        raise DataError(reason or f"{where}: {_root_cause(error)}") from error


def load_id(path: str, *, key: str, split: str) -> datasets.Dataset:
    """Return one split of a Hugging Face data set; the id may name a configuration."""
    dataset, configuration = hub_name(path)
    try:
        with quiet():
            return datasets.load_dataset(dataset, configuration, split=split)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        cause = _root_cause(error, num_lines=2)
        if several := _SEVERAL.search(str(error)):
            choices = " or ".join(f"{dataset}:{name}" for name in ast.literal_eval(several[1]))
            cause = f"it has several configurations; name one: {choices}"
        raise DataError(
            f"{key}={path} (data.split={split}): neither a .jsonl, .json or .parquet file "
            f"nor a data set that can be loaded: {cause}"
        ) from error


def _root_cause(error: BaseException, *, num_lines: int = 1) -> str:
    """Return the first lines of the innermost error, which is the most specific one."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join((str(error).strip() or type(error).__name__).splitlines()[:num_lines])


def map_again(table: datasets.Dataset) -> datasets.Dataset:
    """Return the table on a new mapping: pages of the old one count as memory of this process."""
    files = [str(entry["filename"]) for entry in table.cache_files]
    if not files:
        return table
    mapped = datasets.concatenate_datasets([datasets.Dataset.from_file(name) for name in files])
    return (
        mapped if len(mapped) == len(table) else table
    )  # the table is a part of the files, as with train[:10%]


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the progress bars of `datasets` and its log lines about errors that are raised."""
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


def hub_name(path: str) -> tuple[str, str | None]:
    """Split a path into a data set id and its configuration (None if the path names none).

    The configuration follows a colon, as in openai/gsm8k:main. A local folder is never split.
    """
    folder = Path(path)
    if folder.is_dir():
        # `datasets` uses the folder's name, which "." lacks.
        return path if folder.name else str(folder.absolute()), None
    dataset, _, configuration = path.partition(":")
    return dataset, configuration or None
