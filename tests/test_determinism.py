"""With `deterministic=true` a run is a function of its configuration and its seed."""

from __future__ import annotations

import pytest
from command_line import command, run_all, write_task
from equal_runs import SETTINGS, check_equal

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine]


def test_equal_settings_give_equal_samples_metrics_and_weights(tmp_path):
    """To the last bit, though every score comes at a moment of its own; of two workers in
    test_workers_engines.py.

    Fails when scores are consumed as they come: another tick then decides which groups are ready.
    The two runs are side by side: each disturbs the other's clock.
    """
    task = write_task(tmp_path)
    programs = [
        command(task, tmp_path / name, *SETTINGS, "rollout.resume=reprefill", "runtime.threads=2")
        for name in ("first", "second")
    ]
    for done in run_all(programs, tmp_path):
        assert done.returncode == 0, done.stderr[-3000:]
    rows = check_equal(tmp_path / "first", tmp_path / "second")
    assert sum(row.get("rollout/kept_samples", 0) for row in rows) == 0
