"""Runs with adapters through the command: adapters sent on their own, or merged into the whole
weights.
"""

from pathlib import Path

import pytest
from command_line import command, run_all, steps_of, write_task
from exported_adapters import check_merged
from safetensors.torch import load_file

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.cpu_engine]
SYNCS = ("adapter", "merged")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Return the directories of two float32 runs that differ in what a sync sends."""
    task = write_task(tmp_path_factory.mktemp("task"))
    own = ("lora.rank=8", "rollout.resume=keep", "rollout.max_staleness=2", "deterministic=true")
    programs = [command(task, task / sync, *own, f"lora.sync={sync}") for sync in SYNCS]
    for done in run_all(programs, task):
        assert done.returncode == 0, done.stderr[-3000:]
    return {sync: task / sync for sync in SYNCS}


def test_engine_and_learner_agree_for_each_form_of_sync(runs):
    """Kept samples continue. Fails when an engine samples with an older adapter or without one."""
    for run_dir in runs.values():
        rows = steps_of(run_dir)
        assert len(rows) == 4
        assert sum(row["rollout/resumed_samples"] for row in rows) > 0
        # Measured in a step in which all tokens are of its own version.
        key = "mismatch/logprob_abs_mean"
        mismatches = [row[key] for row in rows if key in row]
        assert len(mismatches) > 1
        assert max(mismatches) < 1e-5


def test_a_sync_sends_the_adapter_or_the_whole_weights(runs):
    """In float32. Fails when both are sent, or the metric counts something else."""
    export = next(runs["adapter"].glob("exports/step_*"))
    sent = {
        "adapter": load_file(export / "adapter" / "adapter_model.safetensors"),
        "merged": load_file(runs["adapter"].parent / "model" / "model.safetensors"),
    }
    for sync, run_dir in runs.items():
        num_bytes = sum(4 * tensor.numel() for tensor in sent[sync].values())
        assert {row["sync/bytes"] for row in steps_of(run_dir)} == {num_bytes}


def test_an_export_is_merged_for_each_form_of_sync(runs):
    start = load_file(runs["merged"].parent / "model" / "model.safetensors")
    for run_dir in runs.values():
        check_merged(next(run_dir.glob("exports/step_*")), start, scaling=32 / 8)
