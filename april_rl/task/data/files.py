"""Data files: how to recognise their paths, and the checks before anything heavy is imported."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path

from april_rl.config import TrainConfig
from april_rl.config.prompt_sets import evaluation_set, training_sets
from april_rl.config.task import TASK_PREFIX, PromptSetConfig
from april_rl.errors import DataError
from april_rl.task.data.json_faults import is_json, json_fault

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_READ_BY_DATASETS = (*FORMATS, ".csv", ".tsv", ".arrow", ".txt", ".xml", ".zip", ".tar", ".gz")
_MANY_FILES = 10_000
# Bytes of a JSON file that are read for its first row; a smaller file is read whole.
_START_BYTES = 2**20


def is_file(path: str) -> bool:
    """Return whether the path names a file, not a data set id or a procedural task."""
    return Path(path).suffix in FORMATS or Path(path).is_file()


def check_files(
    config: TrainConfig,
    *,
    trains: bool = True,
    evaluates: bool = True,
    columns_of: Callable[[str], Collection[str]] = lambda _: (),
) -> None:
    """Raise DataError for a data file that is missing, empty or of another kind, or lacks a column
    of the settings, or of `columns_of`, what the reward needs of a data set; or for a wrong setting
    of a procedural task. A command that does not train or evaluate leaves out those data sets.
    """
    for name, chosen in training_sets(config.data).items() if trains else ():
        key = f"data.sources.{name}.path" if name else "data.path"
        _check(chosen, key=key, of_reward=columns_of(name))
    for name, held_out in config.evaluation.sets.items() if evaluates else ():
        try:
            key, chosen = f"evaluation.sets.{name}.path", evaluation_set(config.data, held_out)
            _check(chosen, key=key, of_reward=columns_of(name))
        except DataError as error:
            raise of_held_out(error, name) from error


def of_held_out(error: DataError, name: str) -> DataError:
    return DataError(
        f"{error}\nThe set {name} comes from the recipe or the command line, and reads its columns "
        f"as data.* says: change that with evaluation.sets.{name}.path and .prompt_column, or "
        f"leave it out with evaluation.sets.{name}=null"
    )


def no_column(where: str, setting: str, names: Iterable[str]) -> DataError:
    return DataError(f"{where} has no column {setting}; the columns are {', '.join(names)}")


def _check(chosen: PromptSetConfig, *, key: str, of_reward: Collection[str]) -> None:
    path, where = chosen.path, f"{key}={chosen.path}"
    if path.startswith(TASK_PREFIX):
        from april_rl.task.data.procedural import open_task  # --cfg job does without its xxhash

        open_task(chosen, key=key)
    if Path(path).is_dir() and not _has_data(Path(path)):
        raise DataError(
            f"{where} is a folder without data files: give a file that ends in {', '.join(FORMATS)}"
        )
    if not is_file(path):
        return
    check_file(path, where=where)
    file = Path(path)
    is_small_json = FORMATS[file.suffix] == "json" and file.stat().st_size <= _START_BYTES
    if is_small_json and not is_json(path) and (fault := json_fault(path, where=where)):
        raise DataError(fault)
    columns = {"prompt": chosen.prompt_column, "answer": chosen.answer_column}
    for kind, column in columns.items():
        if lacking := _names_if_none_is(path, {column, column.partition(".")[0]}):
            raise no_column(where, f"data.{kind}_column={column}", lacking)
    for column in sorted(of_reward):
        if lacking := _names_if_none_is(path, {column}):
            raise no_column(where, f"{column}, which the reward needs", lacking)


def _names_if_none_is(path: str, wanted: set[str]) -> list[str]:
    """Return the columns of a file if no wanted one is among them, else []."""
    is_parquet = FORMATS[Path(path).suffix] == "parquet"
    names = _columns_of_parquet(path) if is_parquet else _names_without(path, wanted)
    return [] if wanted & {*names} else names


def _has_data(folder: Path) -> bool:
    """Return whether a folder has a file with data, or too many files to look at all of them."""
    found = list(islice(folder.rglob("*"), _MANY_FILES))
    return len(found) == _MANY_FILES or any(one.suffix in _READ_BY_DATASETS for one in found)


def _columns_of_parquet(path: str) -> list[str]:
    """Return the columns of a parquet file; none if it is broken, which `open_source` reports."""
    import pyarrow.parquet

    with suppress(pyarrow.ArrowException, OSError):
        return list(pyarrow.parquet.read_schema(path).names)
    return []


def _names_without(path: str, wanted: set[str]) -> list[str]:
    """Return the columns of a JSON file's first row if no row can have a wanted column, else []."""
    with Path(path).open("rb") as file:
        start = file.read(_START_BYTES).decode(errors="ignore").lstrip("\ufeff \t\r\n[")
        row: object = None
        with suppress(json.JSONDecodeError):
            row, _ = json.JSONDecoder().raw_decode(start)
        if not isinstance(row, dict) or wanted & row.keys():
            return []
        file.seek(0)
        written = [json.dumps(name).encode() for name in wanted]
        is_there = any(name in line for line in file for name in written)
    return [] if is_there or not all(map(str.isascii, wanted)) else list(row)


def check_file(path: str, *, where: str) -> None:
    """Raise DataError unless the file can be read, has a known ending, and is not empty."""
    if "://" in path:
        raise DataError(f"{where} is an address: download the file and give its path")
    if Path(path).suffix not in FORMATS:
        raise DataError(f"{where}: a data file must end in {', '.join(FORMATS)}")
    try:
        with Path(path).open("rb") as file:
            is_empty = not file.read(1)
    except OSError as error:
        raise DataError(f"{where}: cannot be read: {error.strerror}") from error
    if is_empty:
        raise DataError(f"{where}: the file is empty")
