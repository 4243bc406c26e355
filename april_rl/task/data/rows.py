"""Read the question, the answer and the extra columns of each row of a table."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from datetime import date, time
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from april_rl.config.task import PromptSetConfig
from april_rl.errors import DataError
from april_rl.task.data.columns import PathError, column_of, list_of_json, unsaved_type
from april_rl.task.data.json_faults import describe
from april_rl.task.data.messages import conversation, has_role, place_of_question
from april_rl.task.data.sources import RawTable, RowNames, map_again
from april_rl.task.data.unread import media_columns, placeholder
from april_rl.types import Message

_EXACT_BELOW = 2**53  # a float holds every whole number below this
_BATCH_ROWS = 1000
_MAPPED_ROWS = 100_000  # rows to read before the file is mapped again


class Row(NamedTuple):
    """The question and the answer of one row, as text or as the messages of a chat."""

    prompt: str | tuple[Message, ...]
    answer: str


class RowReader:
    """Reads questions and answers according to a set's settings; every message names its row."""

    def __init__(self, raw: RawTable, chosen: PromptSetConfig, columns: Collection[str]) -> None:
        self._names: RowNames = raw.names
        features = raw.table.features
        self._prompt = column_of(raw.where, f"data.prompt_column={chosen.prompt_column}", features)
        self._answer = column_of(raw.where, f"data.answer_column={chosen.answer_column}", features)
        for column in sorted(columns):
            if column not in features:
                raise DataError(
                    f"{raw.where} has no column {column}, which the reward needs; the columns are "
                    f"{', '.join(features)}"
                )
            kind = unsaved_type(raw.table.data.schema.field(column).type)
            if kind is not None:
                raise DataError(
                    f"{raw.where}: the reward needs column {column}, whose values are {kind}; "
                    "a checkpoint holds text, numbers, booleans, lists and mappings of these: "
                    "write it as text"
                )
        # The extra columns, with their kinds.
        self.columns = {name: features[name] for name in sorted(columns)}
        self._media = ", ".join(media_columns(raw))
        self._columns_shown = f" (columns: {', '.join(features)})"
        self._prompt_pattern = re.compile(chosen.prompt_pattern) if chosen.prompt_pattern else None
        self._answer_pattern = re.compile(chosen.answer_pattern) if chosen.answer_pattern else None

    @property
    def needed_columns(self) -> list[str]:
        return sorted({self._prompt.path[0], self._answer.path[0], *self.columns})

    def rows(self, batch: Mapping[str, list[Any]], places: Collection[int]) -> Iterator[Row]:
        """Yield the row at each place of the table [batch]; raises DataError for an invalid one."""
        values = zip(self._prompt.of(batch), self._answer.of(batch), places, strict=True)
        for prompt, answer, place in values:
            try:
                yield Row(
                    self._question(self._prompt.value(prompt), place),
                    self._gold(self._answer.value(answer), place),
                )
            except PathError as error:
                raise DataError(f"{self._names.name(place)}: {error}") from None

    def is_answered(self, batch: Mapping[str, list[Any]]) -> list[bool]:
        return [self._is_answered(value) for value in self._answer.of(batch)]

    def _is_answered(self, value: object) -> bool:
        try:
            return self._find(self._answer.value(value)) is not None
        except ValueError:
            return False

    def _question(self, value: object, place: int) -> str | tuple[Message, ...]:
        try:
            prompt = _to_prompt(value)
        except ValueError as error:
            raise DataError(
                f"{self._names.name(place)}: {self._prompt.setting} {error}{self._columns_shown}"
            ) from None
        if self._media:
            self._check_text_alone(prompt, place)
        if self._prompt_pattern is None:
            return prompt
        at = 0 if isinstance(prompt, str) else place_of_question(prompt)
        text = prompt if isinstance(prompt, str) else prompt[at]["content"]
        match = self._prompt_pattern.search(text)
        if match is None or not match[1]:
            raise DataError(
                f"{self._names.name(place)}: data.prompt_pattern={self._prompt_pattern.pattern} "
                f"finds nothing in this prompt: {text[:80]!r}"
            )
        if isinstance(prompt, str):
            return match[1]
        return (*prompt[:at], {**prompt[at], "content": match[1]}, *prompt[at + 1 :])

    def _check_text_alone(self, prompt: str | tuple[Message, ...], place: int) -> None:
        texts = [prompt] if isinstance(prompt, str) else [m["content"] for m in prompt]
        if mark := next(filter(None, map(placeholder, texts)), None):
            raise DataError(
                f"{self._names.name(place)}: the question shows something with {mark}, and column "
                f"{self._media} is not read: prompts are text only; leave such rows out"
            )

    def _gold(self, value: object, place: int) -> str:
        answer = self._find(value)
        if answer is None:
            raise UnansweredError(self._complaint(value, place))
        if isinstance(answer, str):
            return answer
        remedy = "; give a JSON file itself as data.path" if isinstance(answer, date | time) else ""
        raise DataError(
            f"{self._names.name(place)}: {self._answer.setting} must be text, a number or a list "
            f"with one of these, got {describe(answer)}{remedy}"
        )

    def _find(self, value: object) -> object:
        """Return the answer after applying the pattern to text; None if there is none."""
        text = _to_answer(value)
        if not isinstance(text, str):
            return text
        if self._answer_pattern is None:
            return _only(list_of_json(text, lambda item: isinstance(item, str)) or [text])
        matches = self._answer_pattern.findall(text)
        return (matches[-1].strip() or None) if matches else None

    def _complaint(self, value: object, place: int) -> str:
        name, text = self._names.name(place), _to_answer(value)
        if text is None or self._answer_pattern is None:
            return f"{name}: {self._answer.setting} is missing, null, NaN or empty in this row"
        return (
            f"{name}: data.answer_pattern={self._answer_pattern.pattern} finds nothing in this "
            f"row's answer {str(text)[-80:]!r}"
        )


class UnansweredError(DataError):
    """Raised for a row without an answer; the caller appends the number of such rows."""


def check_rows(raw: RawTable, reader: RowReader) -> NDArray[np.bytes_]:
    """Return a digest of prompt and answer of every row [rows]. Raise DataError naming the
    first invalid row and, for missing answers, how many rows lack one.
    """
    digests: list[NDArray[np.bytes_]] = []
    try:
        for places, batch in _batches(raw, reader):
            digest = b"".join(_digest(row) for row in reader.rows(batch, places))
            digests.append(np.frombuffer(digest, dtype="S16"))
    except UnansweredError as error:
        without = sum(
            not ok for _, batch in _batches(raw, reader) for ok in reader.is_answered(batch)
        )
        total = len(raw.table)
        raise DataError(f"{error} (in {without} of {total} rows)") from error
    return np.concatenate(digests)


def _batches(raw: RawTable, reader: RowReader) -> Iterator[tuple[range, dict[str, list[Any]]]]:
    for first in range(0, len(raw.table), _MAPPED_ROWS):
        last = min(first + _MAPPED_ROWS, len(raw.table))
        mapped = map_again(raw.table).select_columns(reader.needed_columns)
        part = mapped.select(range(first, last))
        for start, batch in enumerate(part.iter(batch_size=_BATCH_ROWS)):
            place = first + start * _BATCH_ROWS
            yield range(place, min(place + _BATCH_ROWS, last)), batch


def _digest(row: Row) -> bytes:
    """Return 16 bytes that are equal for equal prompt and answer."""
    return xxhash.xxh3_128_digest(json.dumps(row, sort_keys=True, default=str).encode())


def _to_prompt(value: object) -> str | tuple[Message, ...]:
    """Return the text or the chat messages, which may be JSON text; else raise ValueError."""
    if isinstance(value, str) and value:
        value = list_of_json(value, has_role) or value
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(map(has_role, value)):
        return conversation(value)
    if value is None or value in ("", []):
        raise ValueError("is missing or empty in this row")
    raise ValueError(
        f"must be text or a list of messages with role and content, got {describe(value)}"
    )


def _only(values: list[Any]) -> object:
    """Return the single answer of a list, None if it is empty, the list if its answers differ."""
    answers = [_to_answer(value) for value in values]
    is_one = len({str(answer).strip() for answer in answers}) == 1
    return answers[0] if is_one else answers or None


def _to_answer(value: object) -> object:
    """Normalize an answer: text and numbers to text, empty values to None, others unchanged.

    Whole numbers have no decimal point, even in a column of floats; a list of equal answers
    becomes that answer.
    """
    if isinstance(value, list):
        return _only(value)
    if isinstance(value, str):
        return value if value.strip() else None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT_BELOW:
        return str(int(value))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    return value
