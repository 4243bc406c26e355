"""Read a JSON file into an Arrow file without changing values: text never becomes a date, and all
digits of a number are kept.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets.features.features import register_feature

from april_rl.task.data.json_faults import describe

_CHUNK_CHARACTERS = 2**24
_SAFE_DIGITS = 15  # a float keeps any number of this many digits
_INT64 = range(-(2**63), 2**63)

Rows = list[dict[str, Any]]


@dataclass
class MixedJson(datasets.Json):  # type: ignore[misc]  # untyped library
    """A column with several kinds of values as JSON text; the library's own class changes them."""

    _type: str = field(default="MixedJson", init=False, repr=False)

    def decode_example(
        self, example_data: str | None, token_per_repo_id: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401
        """Return the value of a JSON text."""
        del token_per_repo_id
        return None if example_data is None else json.loads(example_data)


# The library warns that the function is experimental.
with warnings.catch_warnings(action="ignore"):
    register_feature(MixedJson, "MixedJson")


def to_storage(values: list[Any], kind: object) -> list[Any]:
    """Return the values of a column in the form in which a table of `datasets` stores them."""
    if not isinstance(kind, datasets.Json):
        return values
    return [None if value is None else json.dumps(value) for value in values]


def to_public_types(table: datasets.Dataset) -> datasets.Dataset:
    """Return the table with column classes that every user of `datasets` has."""
    kinds = {
        name: datasets.Json() if isinstance(kind, MixedJson) else kind
        for name, kind in table.features.items()
    }
    return table.cast(datasets.Features(kinds))


def read_json(path: str, target: Path) -> datasets.Dataset:
    """Write the rows of a JSON file to the Arrow file `target`, and return it; raise ValueError."""
    kinds = _kinds(path)
    while True:
        features = datasets.Features({name: _feature(kind) for name, kind in kinds.items()})
        misfit = _write(path, target, features)
        if misfit is None:
            return datasets.Dataset.from_file(str(target))
        kinds[misfit] = None


def _kinds(path: str) -> dict[str, pa.DataType | None]:
    kinds: dict[str, pa.DataType | None] = {}
    for rows in _chunks(path):
        names = dict.fromkeys(name for row in rows for name in row)
        for name in names:
            if kinds.get(name, ...) is not None:
                found = _array([row.get(name) for row in rows], None)
                known = kinds.get(name, pa.null())
                kinds[name] = found and _common(known, found.type)
    return kinds


def _array(values: list[Any], kind: pa.DataType | None) -> pa.Array | None:
    """Return the values as an Arrow array, or None if they have no common type or not `kind`."""
    try:
        return pa.array(values, type=kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        return None


def _common(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    schemas = [pa.schema({"": kind}) for kind in (one, other)]
    try:
        both = pa.unify_schemas(schemas, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return None
    return both.field(0).type


def _feature(kind: pa.DataType | None) -> Any:  # noqa: ANN401
    if kind is None:
        return MixedJson()
    return datasets.Features.from_arrow_schema(pa.schema({"": kind}))[""]


def _write(path: str, target: Path, features: datasets.Features) -> str | None:
    schema = features.arrow_schema
    with pa.OSFile(str(target), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for rows in _chunks(path):
            arrays = {
                name: _stored_array([row.get(name) for row in rows], feature)
                for name, feature in features.items()
            }
            misfits: list[str] = [name for name, array in arrays.items() if array is None]
            if misfits:
                return misfits[0]
            writer.write_batch(pa.record_batch(list(arrays.values()), schema=schema))
    return None


def _stored_array(values: list[Any], feature: Any) -> pa.Array | None:  # noqa: ANN401
    if not isinstance(feature, MixedJson):
        return _array(values, datasets.Features({"": feature}).arrow_schema.field(0).type)
    texts = pa.array(to_storage(values, feature), type=pa.string())
    return pa.ExtensionArray.from_storage(feature.pa_type, texts)


def _chunks(path: str) -> Iterator[Rows]:
    """Yield the rows of the file in chunks of some megabytes of text."""
    with Path(path).open(encoding="utf-8-sig", newline="\n") as file:
        first = file.readline()
        while first and not first.strip():
            first = file.readline()
        if not _is_object(first):
            file.seek(0)
            yield from _whole(file.read().removeprefix("\ufeff"))
            return
        line, number = first, 0
        while line:
            lines = [line, *file.readlines(_CHUNK_CHARACTERS)]
            values = [_decode(each) for each in lines if each.strip()]
            if rows := _objects(values, first=number):
                yield rows
            number += len(rows)
            line = file.readline()


def _is_object(line: str) -> bool:
    """Return whether a line is a whole JSON object, not the beginning of a larger document."""
    try:
        return isinstance(_decode(line), dict)
    except ValueError:
        return False


def _whole(text: str) -> Iterator[Rows]:
    values, at = [], 0
    while text := text[at:].lstrip():
        value, at = _DECODER.raw_decode(text)
        values += value if isinstance(value, list) else [value]
    if values:
        yield _objects(values, first=0)


def _objects(values: list[Any], *, first: int) -> Rows:
    for number, value in enumerate(values, start=first + 1):
        if not isinstance(value, Mapping):
            raise ValueError(
                f"row {number} must be a JSON object, whose names are the columns, got "
                f"{describe(value)}; docs/data.md shows how to convert a list of lists"
            )
    return values


def _integer(text: str) -> int | str:
    """Return a whole number, or its text if it is too large for a table."""
    value = int(text) if len(text) <= len(str(_INT64.start)) else _INT64.stop
    return value if value in _INT64 else text


def _decimal(text: str) -> float | str:
    """Return a decimal number, or its text if a float does not keep its digits."""
    value = float(text)
    if not math.isfinite(value):
        return text
    return value if len(text) <= _SAFE_DIGITS or Decimal(repr(value)) == Decimal(text) else text


_DECODER = json.JSONDecoder(parse_int=_integer, parse_float=_decimal)
_decode = _DECODER.decode
