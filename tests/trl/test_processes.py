"""Partial rollouts under TRL in two processes, across the ends of epochs."""

import shutil
from collections import Counter
from pathlib import Path

import pytest
from trl_runs import WITH_TRL, opened_rows, rows_of, run, run_processes, steps_of

from april_rl.run.checkpointing.columns import read_state

pytestmark = WITH_TRL
RANKS = (0, 1)
SETTINGS = {"steps": -1, "num_rows": 40}  # two batches of 16, and 8 rows that TRL leaves out


def epochs(number: int) -> dict[str, object]:
    return {**SETTINGS, "grpo": {"num_train_epochs": number}}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[dict]:
    return run_processes(tmp_path_factory.mktemp("alone"), processes=2, **epochs(6))


@pytest.fixture(scope="module")
def partial(tmp_path_factory) -> tuple[Path, list[dict]]:
    folder = tmp_path_factory.mktemp("partial")
    return folder, run_processes(folder, processes=2, over_sampling_factor=1.5, **epochs(2))


def test_two_processes_without_over_sampling_equal_trl_alone(alone, tmp_path):
    """Fails when a process has rows of the other, or an epoch ends at another row."""
    ours = run_processes(tmp_path, processes=2, over_sampling_factor=1, refill=False, **epochs(6))
    for rank in RANKS:
        assert ours[rank]["batches"] == alone[rank]["batches"]
        assert len(ours[rank]["batches"]) == 12
        for own, other in zip(steps_of(ours[rank]), steps_of(alone[rank]), strict=True):
            assert {key: own[key] for key in other if key != "step_time"} == {
                key: value for key, value in other.items() if key != "step_time"
            }


def check_shares(alone: list[dict], batches: list[list[dict]], checkpoint: Path) -> None:
    """Fail unless each process has opened the rows that TRL gives it, in TRL's order."""
    for rank in RANKS:
        rows = opened_rows(batches[rank], checkpoint, rank)
        expected = rows_of(alone[rank]["batches"])[: len(rows)]
        assert len(expected) == len(rows), "the run used for comparison is too short"
        assert Counter(rows) == Counter(expected)


def test_two_processes_train_each_row_of_their_shares_once(alone, partial):
    folder, found = partial
    check_shares(alone, [each["batches"] for each in found], folder / "checkpoint-4")
    logs = [
        [{key: step[key] for key in step if key.startswith("april/")} for step in steps_of(each)]
        for each in found
    ]
    assert logs[0] == logs[1], "the log covers both processes"
    assert max(step["april/age_max"] for step in logs[0]) >= 1
    states = [read_state(folder / "checkpoint-4", f"april_rl_{rank}") for rank in RANKS]
    assert [state["policy_version"] for state in states] == [4, 4]


def test_two_processes_continue_from_a_checkpoint(alone, partial, tmp_path):
    folder, found = partial
    checkpoint = shutil.copytree(folder / "checkpoint-2", tmp_path / "checkpoint-2")
    again = run_processes(
        tmp_path, processes=2, over_sampling_factor=1.5, resume=str(checkpoint), **epochs(3)
    )
    steps = steps_of(again[0])[-4:]
    assert [step["step"] for step in steps] == [3, 4, 5, 6]
    assert max(step["april/resumed_frac"] for step in steps) > 0
    batches = [[*found[rank]["batches"][:2], *again[rank]["batches"]] for rank in RANKS]
    check_shares(alone, batches, tmp_path / "checkpoint-6")


def test_another_number_of_processes_is_refused(partial, tmp_path):
    folder, _ = partial
    resume = str(folder / "checkpoint-2")
    found = run(tmp_path, over_sampling_factor=1.5, resume=resume, **epochs(3))
    assert "was saved by 2 processes with 8 prompts of a batch in each" in found["refused"]
