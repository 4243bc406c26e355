"""With `deterministic=true` a run is a function of its configuration and its seed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from command_line import command, run, run_until_killed, write_task
from equal_runs import SETTINGS, check_equal

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine]


OWN = ("rollout.resume=reprefill", "runtime.threads=2", "checkpoint.every_steps=2")


def test_equal_settings_give_equal_samples_metrics_and_weights_also_after_a_kill(tmp_path):
    """To the last bit, though every score comes at a moment of its own; of two workers in
    test_workers_engines.py. The second run is killed in its fourth step, or soon after, and goes on
    from the second or fourth.

    Fails when scores are consumed as they come: another tick then decides which groups are ready.
    Fails when a checkpoint lacks a moment, the schedule, a parked token, a score, the place in the
    prompt stream or the expected length, or when rows of metrics are lost or there twice.
    The two runs are side by side: each disturbs the other's clock.
    """
    task = write_task(tmp_path)
    first, second = (
        command(task, tmp_path / name, *SETTINGS, *OWN) for name in ("first", "second")
    )

    def killed_and_resumed() -> list[str]:
        run_until_killed(second, tmp_path, lambda: has_row(tmp_path / "second", step=3))
        assert (tmp_path / "second" / "checkpoints" / "step_2").is_dir()
        done = run([*second, "resume=auto"], tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.splitlines()

    with ThreadPoolExecutor() as threads:
        resumed = threads.submit(killed_and_resumed)
        done = run(first, tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        assert any(line.startswith("resumed from ") for line in resumed.result())
    rows = check_equal(tmp_path / "first", tmp_path / "second")
    assert sum(row.get("rollout/kept_samples", 0) for row in rows) == 0


def has_row(run_dir: Path, *, step: int) -> bool:
    path = run_dir / "metrics.jsonl"
    return path.is_file() and f'{{"step": {step},' in path.read_text()
