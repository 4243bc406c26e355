"""Columns that a setting names: by name, or by a dotted path into structs and JSON text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from april_rl.errors import DataError
from april_rl.task.data.files import no_column
from april_rl.task.data.json_faults import describe

_NARROW: Mapping[str, type[np.floating[Any]]] = {"float16": np.float16, "float32": np.float32}


class PathError(ValueError):
    """Raised for a value that a dotted path cannot descend into."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table, or a field of its structs that a dotted path names."""

    setting: str  # for messages
    path: tuple[str, ...]
    narrow: type[np.floating[Any]] | None  # type of its numbers, if shorter than Python's floats

    def of(self, batch: Mapping[str, list[Any]]) -> list[Any]:
        return batch[self.path[0]]

    def value(self, given: object) -> Any:  # noqa: ANN401
        """Return the value at the path, or None; raise PathError where a value has no fields."""
        for depth, name in enumerate(self.path[1:], start=1):
            given = self._fields(given, ".".join(self.path[:depth])).get(name)
        return given if self.narrow is None else _shortest(given, self.narrow)

    def _fields(self, given: object, name: str) -> Mapping[str, Any]:
        if isinstance(given, str):
            given = self._parse(given, name)
        if isinstance(given, Mapping):
            return given
        if given is None:
            return {}
        raise PathError(
            f"{self.setting} leads through {name}, which is {describe(given)}, not a struct"
        )

    def _parse(self, text: str, name: str) -> object:
        try:
            return json.loads(text)
        except ValueError:
            raise PathError(
                f"{self.setting} leads through {name}, which is text, not JSON: {text[:60]!r}"
            ) from None


def column_of(where: str, setting: str, features: Mapping[str, Any]) -> Column:
    """Return the column that `setting` names, exactly or by a path; raise DataError if there is
    none.
    """
    column = setting.partition("=")[2]
    if column in features:
        return Column(setting, (column,), _narrow_type(features[column]))
    path = tuple(column.split("."))
    if path[0] not in features:
        raise no_column(where, setting, features)
    inner: Any = features[path[0]]
    for depth, name in enumerate(path[1:], start=1):
        if isinstance(inner, datasets.List):
            raise DataError(
                f"{where}: {setting} leads through {'.'.join(path[:depth])}, which is a list; a "
                "path leads through structs, so write the value into a column of its own"
            )
        if isinstance(inner, Mapping) and name not in inner:
            raise DataError(
                f"{where} has no column {setting}: no {name!r}; the fields are {', '.join(inner)}"
            )
        inner = inner[name] if isinstance(inner, Mapping) else None
    return Column(setting, path, _narrow_type(inner))


def _narrow_type(kind: object) -> type[np.floating[Any]] | None:
    while isinstance(kind, datasets.List | datasets.LargeList):
        kind = kind.feature
    return _NARROW.get(kind.dtype) if isinstance(kind, datasets.Value) else None


def _shortest(value: object, narrow: type[np.floating[Any]]) -> object:
    """Return the number with the fewest digits that `narrow` rounds to the same number: 0.1 for
    the float32 0.10000000149011612. Whole numbers stay as they are, of a list each number counts.
    """
    if isinstance(value, list):
        return [_shortest(item, narrow) for item in value]
    if isinstance(value, float) and not value.is_integer():
        return float(str(narrow(value)))
    return value


def list_of_json(text: str, is_item: Callable[[object], bool]) -> list[Any] | None:
    """Return the list in a JSON text if all its items pass `is_item`, else None."""
    if not text.lstrip().startswith("["):
        return None
    try:
        values: list[Any] = json.loads(text)
    except ValueError:
        return None
    return values if all(map(is_item, values)) else None


def unsaved_type(kind: pa.DataType) -> pa.DataType | None:
    """Return the first type within `kind` whose values JSON cannot represent, or None."""
    types = pa.types
    if types.is_temporal(kind) or types.is_decimal(kind):
        return kind
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return kind
    inner = (unsaved_type(kind.field(i).type) for i in range(kind.num_fields))
    return next((found for found in inner if found is not None), None)
