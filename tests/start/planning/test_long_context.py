"""The table of docs/gpu.md of the longest sequences shows the results of the memory plan."""

import re

import pytest
from planned_models import GPU, INPUTS, change, sizes_of
from source_tree import ROOT

from april_rl.config.choices import Offload
from april_rl.errors import PreflightError
from april_rl.start.planning.memory_check import Room, check_plan
from april_rl.start.planning.memory_inputs import MemoryInputs

TABLE = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| Qwen3-(\S+) \| `(.*)` \| (.*) \|$", TABLE, flags=re.MULTILINE)
NUM_GPUS = (1, 2, 4, 8)
KEYS = {
    "learner.offload": lambda value: {"offload": Offload[value]},
    "learner.activation_checkpointing": lambda value: {"activation_checkpointing": value == "true"},
    "lora.rank": lambda value: {"rank": int(value)},
}


def inputs_of(overrides: str, *, num_gpus: int) -> MemoryInputs:
    """Return the inputs of a row, with activation checkpointing and half of the GPU for an engine
    that sleeps.
    """
    found = change(INPUTS, num_workers=num_gpus)
    for override in overrides.split():
        key, value = override.split("=")
        found = change(found, **KEYS[key](value))
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}")
def test_a_sequence_of_the_tables_length_fits_and_a_longer_one_does_not(row):
    """In thousands of tokens, rounded down; "-" means that not even a short one fits."""
    model, overrides, cells = row
    for num_gpus, cell in zip(NUM_GPUS, cells.split(" | "), strict=True):
        longest = 0 if cell == "-" else int(cell.removesuffix("k")) * 1000

        def fits(num_tokens: int, num_gpus: int = num_gpus) -> bool:
            inputs = inputs_of(overrides, num_gpus=num_gpus)
            budget = max(1, num_tokens)
            inputs = change(inputs, max_tokens=budget, longest_tokens=budget)
            room = Room(device=GPU, free=0.98 * GPU)
            try:
                return bool(check_plan(sizes_of(model, rank=inputs.lora.rank), inputs, room))
            except PreflightError:
                return False

        assert fits(longest) is (longest > 0), (num_gpus, cell)
        assert not fits(longest + 1000), (num_gpus, cell)


def test_the_table_has_both_models_with_all_rows():
    assert [row[0] for row in ROWS] == ["4B"] * 4 + ["8B"] * 2
