"""Plain data with long arrays, written as two files: JSON, and safetensors for the arrays.

A buffer holds millions of tokens, which would take half a minute to write as JSON. So every
`array` in the data becomes a slice of one column per type, and JSON refers to the slice:
`{"$int32": [start, stop]}`. A key of the data that begins with `$` gets a second `$` in front.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from april_rl.run.checkpointing.file_mode import mode_of_new_files
from april_rl.run.checkpointing.manifest import CheckpointError

Plain = Any  # dicts with string keys, lists, numbers, strings, None, arrays of these types
# The columns are named by the typecode of their arrays.
_COLUMNS = {"B": "uint8", "H": "uint16", "i": "int32", "d": "float64"}
_TYPECODES = {column: typecode for typecode, column in _COLUMNS.items()}


def state_files(name: str) -> tuple[str, str]:
    return f"{name}.json", f"{name}.safetensors"


def write_state(state: Plain, folder: Path, name: str) -> None:
    """Write `state` as `name`.json and `name`.safetensors into `folder`."""
    columns: dict[str, list[array[Any]]] = {column: [] for column in _TYPECODES}
    sizes = dict.fromkeys(columns, 0)
    # A metric of an interrupted step may be infinite; Python's json writes and reads Infinity.
    text = json.dumps(_without_arrays(state, columns, sizes))
    (folder / f"{name}.json").write_text(text, encoding="utf-8")
    path = folder / f"{name}.safetensors"
    with mode_of_new_files(path):
        save_file({column: _concatenate(parts, column) for column, parts in columns.items()}, path)


def read_state(folder: Path, name: str) -> Plain:
    """Return what `write_state` wrote; raise CheckpointError if a file is unreadable."""
    path = folder / f"{name}.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        columns = load_file(folder / f"{name}.safetensors")
        return _with_arrays(state, columns)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} and {name}.safetensors do not contain a checkpoint's state: {error!r}"
        ) from error


def _without_arrays(
    state: Plain, columns: dict[str, list[array[Any]]], sizes: dict[str, int]
) -> Plain:
    """Return `state` with each array replaced by a reference; append the arrays to `columns`."""
    if isinstance(state, array):
        column = _COLUMNS[state.typecode]
        start = sizes[column]
        columns[column].append(state)
        sizes[column] += len(state)
        return {f"${column}": [start, sizes[column]]}
    if isinstance(state, Mapping):
        return {
            f"${key}" if key.startswith("$") else key: _without_arrays(value, columns, sizes)
            for key, value in state.items()
        }
    if isinstance(state, list | tuple):
        return [_without_arrays(value, columns, sizes) for value in state]
    return state


def _with_arrays(state: Plain, columns: Mapping[str, NDArray[Any]]) -> Plain:
    if isinstance(state, list):
        return [_with_arrays(value, columns) for value in state]
    if not isinstance(state, dict):
        return state
    if len(state) == 1:
        [(key, where)] = state.items()
        if key.startswith("$") and not key.startswith("$$"):
            return _slice(columns[key[1:]], *where, typecode=_TYPECODES[key[1:]])
    return {
        key[1:] if key.startswith("$$") else key: _with_arrays(value, columns)
        for key, value in state.items()
    }


def _slice(column: NDArray[Any], start: int, stop: int, *, typecode: str) -> array[Any]:
    if not 0 <= start <= stop <= len(column):
        raise ValueError(f"slice {start}:{stop} of a column with {len(column)} numbers")
    return array(typecode, column[start:stop].tobytes())


def _concatenate(parts: list[array[Any]], column: str) -> NDArray[Any]:
    arrays = [np.frombuffer(part, dtype=column) for part in parts if part]
    return np.concatenate(arrays) if arrays else np.zeros(0, column)
