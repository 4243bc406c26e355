"""Data files and Hugging Face data sets to rows: a prompt, an answer, and where they stand."""

from __future__ import annotations

import json
import logging
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets

from april_rl.data import procedural
from april_rl.data.errors import DataError
from april_rl.data.tokenizer import Message

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
NOISY_LOGGERS = ("datasets", "huggingface_hub")  # both report what is raised as well


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a data set."""

    prompt: str | tuple[Message, ...]  # text, or the messages of a chat
    answer: str
    source: str  # file:line, or data set and row
    columns: Mapping[str, object] = field(default_factory=dict)  # what the reward asks for beside


def load_rows(
    path: str, *, key: str, split: str, prompt_column: str, answer_column: str
) -> list[Row]:
    """Every row of a .jsonl, .json or .parquet file, or of a data set id; raises DataError.

    A dotted column name descends into structs: `reward_model.ground_truth`. `key` is the setting
    that `path` comes from, `split` is of a data set id. Answers that are numbers become text; a row
    without one is refused. A data set id uses the Hugging Face cache, a file leaves nothing behind.
    """
    table_of = partial(
        _to_rows, where=f"{key}={path}", prompt_column=prompt_column, answer_column=answer_column
    )
    if Path(path).suffix in FORMATS or Path(path).is_file():
        with tempfile.TemporaryDirectory() as cache:
            table = _load_file(path, where=f"{key}={path}", cache=cache)
            return table_of(table, _file_sources(path, len(table)))
    table = _load_id(path, key=key, split=split)
    return table_of(table, [f"{path} [{split}] row {i}" for i in range(1, len(table) + 1)])


def load_procedural(
    path: str, *, key: str, split: str, args: Mapping[str, Any], seed: int
) -> list[Row]:
    """Return the rows of `reasoning_gym:NAME`, with the column `entry`; raises DataError."""
    table = datasets.Dataset.from_dict(
        procedural.draw_rows(path, key=key, split=split, args=args, seed=seed)
    )
    rows = _to_rows(
        table,
        [f"{path} [{split}] row {i}" for i in range(1, len(table) + 1)],
        where=f"{key}={path}",
        prompt_column="prompt",
        answer_column="answer",
    )
    return [
        replace(row, columns={"entry": entry})
        for row, entry in zip(rows, table["entry"], strict=True)
    ]


def _load_file(path: str, *, where: str, cache: str) -> datasets.Dataset:
    """The file as a table with at least one row."""
    builder = FORMATS.get(Path(path).suffix)
    if builder is None:
        raise DataError(f"{where}: a data file must end in {', '.join(FORMATS)}")
    is_text = builder == "json"
    _check_readable(path, where=where)
    if is_text:
        _check_text(path, where=where)
    try:
        with _quiet():
            return datasets.load_dataset(builder, data_files=path, split="train", cache_dir=cache)
    except datasets.exceptions.DatasetsError as error:
        reason = _json_fault(path, where=where) if is_text else None
        raise DataError(reason or f"{where}: {_root_cause(error)}") from error
    except ValueError as error:  # how the library says that a JSON file has no rows
        hint = " Are there rows in it?" if is_text else ""
        raise DataError(f"{where}: {_root_cause(error)}{hint}") from error


def _check_readable(path: str, *, where: str) -> None:
    """Raise DataError unless the file is there, may be read, and has something in it."""
    try:
        with Path(path).open("rb") as file:
            is_empty = not file.read(1)
    except OSError as error:
        raise DataError(f"{where}: cannot be read: {error.strerror}") from error
    if is_empty:
        raise DataError(f"{where}: the file is empty")


def _check_text(path: str, *, where: str) -> None:
    """Raise DataError with the first line that is not UTF-8: the library finds out late, and does
    not say where.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{where}:{number}: not UTF-8: {error.reason} "
                    f"0x{line[error.start]:02x} at byte {error.start + 1} of the line"
                ) from error


def hub_name(path: str) -> tuple[str, str | None]:
    """Return the id of a data set and the configuration of it that a path names, or None.

    An id is NAME or OWNER/NAME, so a third part is the configuration: openai/gsm8k/main. A folder
    of this machine is taken whole.
    """
    owner, _, rest = path.partition("/")
    name, _, configuration = rest.partition("/")
    if not configuration or "/" in configuration or Path(path).is_dir() or not owner.strip("."):
        return path, None
    return f"{owner}/{name}", configuration


def _load_id(path: str, *, key: str, split: str) -> datasets.Dataset:
    """Load one split of a Hugging Face data set, of one of its configurations where named."""
    dataset, configuration = hub_name(path)
    try:
        with _quiet():
            return datasets.load_dataset(dataset, configuration, split=split)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise DataError(
            f"{key}={path} (data.split={split}): neither a .jsonl, .json or .parquet file "
            f"nor a data set that can be loaded: {_root_cause(error)}"
        ) from error


def _to_rows(
    table: datasets.Dataset,
    sources: list[str],
    *,
    where: str,
    prompt_column: str,
    answer_column: str,
) -> list[Row]:
    """The two columns of the table as rows."""
    if not sources:
        raise DataError(f"{where}: there are no rows in it")
    prompt_path = _column_path(where, f"data.prompt_column={prompt_column}", table.features)
    answer_path = _column_path(where, f"data.answer_column={answer_column}", table.features)
    needed = table.select_columns(sorted({prompt_path[0], answer_path[0]}))
    read = [(_descend(row, prompt_path), _descend(row, answer_path)) for row in needed]
    _check_answers([answer for _, answer in read], sources, column=answer_column)
    return [
        Row(
            prompt=_to_prompt(prompt, source=source, column=prompt_column),
            answer=_to_answer(answer, source=source, column=answer_column),
            source=source,
        )
        for (prompt, answer), source in zip(read, sources, strict=True)
    ]


def _column_path(where: str, setting: str, features: Mapping[str, Any]) -> tuple[str, ...]:
    """The names to descend through: a column of exactly that name comes before a dotted path."""
    column = setting.partition("=")[2]
    if column in features:
        return (column,)
    path = tuple(column.split("."))
    if path[0] not in features:
        raise DataError(f"{where} has no column {setting}; there are {', '.join(features)}")
    inner: Any = features[path[0]]
    for name in path[1:]:
        if isinstance(inner, Mapping) and name not in inner:
            raise DataError(
                f"{where} has no column {setting}: no {name!r}; there are {', '.join(inner)}"
            )
        inner = inner[name] if isinstance(inner, Mapping) else None
    return path


def _descend(row: Mapping[str, Any], path: tuple[str, ...]) -> Any:  # noqa: ANN401
    """What stands at the end of the path; None where the row has no such thing."""
    value: Any = row
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _to_prompt(value: object, *, source: str, column: str) -> str | tuple[Message, ...]:
    """Text or chat messages; anything else is a DataError."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(_is_message(item) for item in value):
        return tuple({"role": item["role"], "content": item["content"]} for item in value)
    if value is None or value in ("", []):
        raise DataError(f"{source}: data.prompt_column={column} is missing or empty in this row")
    raise DataError(
        f"{source}: data.prompt_column={column} must be text or a list of messages "
        f"with role and content, got {_shown(value)}"
    )


def _is_message(value: object) -> bool:
    """Whether it has a role and a content, both text."""
    return isinstance(value, Mapping) and all(
        isinstance(value.get(key), str) for key in ("role", "content")
    )


def _check_answers(answers: Sequence[object], sources: Sequence[str], *, column: str) -> None:
    """Raise DataError with the first row without an answer, and how many there are."""
    without = [s for answer, s in zip(answers, sources, strict=True) if _is_missing(answer)]
    if without:
        raise DataError(
            f"{without[0]}: data.answer_column={column} is missing, null, NaN or empty in this "
            f"row; so it is in {len(without)} of {len(sources)} rows"
        )


def _is_missing(answer: object) -> bool:
    """Whether nothing can be compared with it."""
    if isinstance(answer, str):
        return not answer.strip()
    return answer is None or (isinstance(answer, float) and not math.isfinite(answer))


def _to_answer(value: object, *, source: str, column: str) -> str:
    """The answer as text; whole numbers without a decimal point, whatever the column's type."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise DataError(
        f"{source}: data.answer_column={column} must be text or a number, got {_shown(value)}"
    )


def _shown(value: object) -> str:
    """Type and beginning of a value, for messages."""
    return f"{type(value).__name__} {str(value)[:80]}"


def _file_sources(path: str, num_rows: int) -> list[str]:
    """`file:line` of each row of a file with one object a line, `file row N` otherwise."""
    if FORMATS[Path(path).suffix] == "json":
        with Path(path).open("rb") as file:
            lines = [number for number, line in enumerate(file, start=1) if line.strip()]
        if len(lines) == num_rows:
            return [f"{path}:{number}" for number in lines]
    return [f"{path} row {number}" for number in range(1, num_rows + 1)]


def _json_fault(path: str, *, where: str) -> str | None:
    """What is wrong with a JSON file and in which line; None when each line is a proper object."""
    text = Path(path).read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        return _fault_of(text, where=where, first_line=1)
    faults = (
        _fault_of(line, where=where, first_line=number)
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    )
    return next((fault for fault in faults if fault), None)


def _fault_of(text: str, *, where: str, first_line: int) -> str | None:
    """The fault of one JSON document that begins in `first_line`."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        return f"{where}:{line}: not valid JSON: {error.msg} (column {error.colno})"
    if isinstance(value, (dict, list)):
        return None
    return f"{where}:{first_line}: every line must be a JSON object, got {_shown(value)}"


def _root_cause(error: BaseException) -> str:
    """The first line of the innermost error, which says more than the outer ones."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars, and no log lines about what is raised anyway."""
    levels = {name: logging.getLogger(name).level for name in NOISY_LOGGERS}
    bars_were_on = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if bars_were_on:
            datasets.enable_progress_bars()
