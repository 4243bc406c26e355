"""Two runs with `deterministic=true` and equal settings, and whether they are equal."""

import re
import shutil
from pathlib import Path

from command_line import rows_of

# Only values that depend on a clock or on the machine's memory may differ: durations and rates, the
# load of the engines, which is averaged over time, the step in which a checkpoint is found to be
# written, and the memory of processes.
TIMED = re.compile(
    r"_s$|^rollout/(in_flight_mean|occupancy)$|^environment/empty_slots_frac$|^checkpoint/"
    r"|^memory/.*_(rss|used)_"
)

# Five steps; scores arrive at random moments.
SETTINGS = (
    "deterministic=true",
    "algorithm.dynamic_sampling=true",
    "reward.function=reward_functions:even_length_in_its_own_time",
    "reward.num_processes=2",
    "trainer.num_steps=5",
    "evaluation.every=5",
    "tracking.save_samples_every=1",
)


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    """Return the rows of metrics.jsonl without values that were measured with a clock."""
    return [{k: v for k, v in row.items() if not TIMED.search(k)} for row in rows_of(run_dir)]


def files_of(run_dir: Path) -> dict[str, bytes]:
    """Return every trained sample, the left-over samples with their log-probabilities, and the
    weights of every export.
    """
    paths = [*run_dir.glob("samples/*.jsonl"), *run_dir.glob("exports/*/*.safetensors")]
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in paths}


def check_equal(first: Path, second: Path, *, num_exports: int = 1) -> list[dict[str, float]]:
    """Check that two runs with SETTINGS left equal files, and return the rows of their metrics."""
    rows, again = metrics_of(first), metrics_of(second)
    assert rows == again
    found, others = files_of(first), files_of(second)
    assert len(found) == 5 + 2 + 1 + num_exports, (
        "five steps, two evaluations, left-over samples, the weights"
    )
    assert [path for path in found.keys() | others if found.get(path) != others.get(path)] == []
    assert sum(row.get("rollout/resumed_samples", 0) for row in rows) > 0
    return rows


def copy_as_killed(run_dir: Path, copy: Path) -> None:
    """Copy the files of the run as if it had been killed after the row of its fifth step, with a
    disk so slow that the fourth step's checkpoint was not complete.
    """
    late = ("report.html", "leftover.jsonl", "step_5", "eval_*_step_5.jsonl")
    shutil.copytree(run_dir, copy, symlinks=True, ignore=shutil.ignore_patterns(*late))
    saved = copy / "checkpoints"
    (saved / "latest").write_text("step_2\n")
    (saved / "step_4" / "manifest.json").unlink()
    (saved / "step_4").rename(saved / ".step_4.partial")
