"""Plain data that contains arrays, written to disk and read back."""

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from april_rl.run.checkpointing.columns import read_state, write_state
from april_rl.run.checkpointing.manifest import CheckpointError

ARRAYS = st.one_of(
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5).map(lambda x: array("i", x)),
    st.lists(st.floats(allow_nan=False), max_size=5).map(lambda x: array("d", x)),
    st.binary(max_size=5).map(lambda x: array("B", x)),
    st.lists(st.integers(0, 2**16 - 1), max_size=5).map(lambda x: array("H", x)),
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | ARRAYS
STATES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.dictionaries(st.text("ab$", min_size=1), inner),
    max_leaves=12,
)


def add_types(state: Any) -> Any:
    """Add the types, which == does not compare."""
    if isinstance(state, dict):
        return {key: add_types(value) for key, value in state.items()}
    if isinstance(state, list):
        return [add_types(value) for value in state]
    return (type(state), getattr(state, "typecode", ""), state)


@given(STATES)
def test_state_is_read_back_exactly_as_it_was_written(tmp_path_factory, state):
    """Fails when two arrays share a slice, a type is lost, a float is rounded, or a key of the data
    ({"$oid": ...}) is mistaken for a slice.
    """
    folder = tmp_path_factory.mktemp("state")
    write_state(state, folder, "rollout")
    assert add_types(read_state(folder, "rollout")) == add_types(state)


def write(folder):
    write_state({"tokens": array("i", range(1000))}, folder, "rollout")
    return folder / "rollout.json", folder / "rollout.safetensors"


@pytest.mark.parametrize(
    ("text", "tensors"),
    [
        ("", None),
        ("{", None),
        ('{"$int32": [0, 1001]}', None),
        ('{"$int32": [-5, 3]}', None),
        ('{"$int32": [0, 1, 2]}', None),
        ('{"$int32": "ab"}', None),
        ('{"$pickle": [0, 1]}', None),
        (None, b""),
        (None, b"\xff" * 100),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, text, tensors):
    """Fails when a library's error, or a slice outside the column, reaches the user."""
    json_file, tensor_file = write(tmp_path)
    if text is not None:
        json_file.write_text(text)
    if tensors is not None:
        tensor_file.write_bytes(tensors)
    with pytest.raises(CheckpointError, match=r"rollout\.json and rollout\.safetensors"):
        read_state(tmp_path, "rollout")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"rollout\.json"):
        read_state(tmp_path, "rollout")
