"""With `deterministic=true` a run is a function of its configuration and its seed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command_line import command, run_all, write_task

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine]
# What is measured with a clock, and alone may differ: durations and rates, and the load of the
# engines, which is averaged over the time they worked.
TIMED = re.compile(r"_s$|^rollout/(in_flight_mean|occupancy)$")


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    """The rows of metrics.jsonl without what a clock measured."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if not TIMED.search(k)} for row in rows]


def files_of(run_dir: Path) -> dict[str, bytes]:
    """Every trained sample, what was left over with its log-probabilities, and the weights."""
    paths = [*run_dir.glob("samples/*.jsonl"), *run_dir.glob("checkpoints/*/*.safetensors")]
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in paths}


@pytest.mark.parametrize(
    ("resume", "machine"),
    [("keep", "runtime.num_workers=2"), ("reprefill", "runtime.threads=2")],
)
def test_equal_settings_give_equal_samples_metrics_and_weights(task, tmp_path, resume, machine):
    """To the last bit, though every score comes at a moment of its own.

    Fails when scores are consumed as they come: another tick then decides which groups are ready.
    With two engines it also fails when the tick that ends first is taken first. The two runs are
    side by side: each disturbs the other's clock.
    """
    programs = [
        command(
            task,
            tmp_path / name,
            "deterministic=true",
            f"rollout.resume={resume}",
            machine,
            "algorithm.dynamic_sampling=true",
            "reward.function=reward_functions:even_length_in_its_own_time",
            "reward.num_processes=2",
            "trainer.num_steps=5",
            "evaluation.every=5",
            "tracking.save_samples_every=1",
        )
        for name in ("first", "second")
    ]
    for done in run_all(programs, tmp_path):
        assert done.returncode == 0, done.stderr[-3000:]
    rows, again = metrics_of(tmp_path / "first"), metrics_of(tmp_path / "second")
    assert rows == again
    found, others = files_of(tmp_path / "first"), files_of(tmp_path / "second")
    assert len(found) == 5 + 2 + 1 + 1, (
        "five steps, two evaluations, what was left over, the weights"
    )
    assert [path for path in found.keys() | others if found.get(path) != others.get(path)] == []
    assert sum(row.get("rollout/resumed_samples", 0) for row in rows) > 0
    kept = sum(row.get("rollout/kept_samples", 0) for row in rows)
    assert (kept > 0) == (resume == "keep")
