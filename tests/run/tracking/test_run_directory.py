"""A run directory belongs to one run."""

import re
from pathlib import Path

import pytest
from test_tracking import make_tracker

from april_rl.errors import RunError
from april_rl.metrics import Metrics
from april_rl.run.tracking.metrics_file import read_metrics
from april_rl.run.tracking.tracker import RunDirectoryError


def test_a_directory_with_a_run_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    """Fails when metrics.jsonl is opened for appending, or config.yaml is written
    before the check.
    """
    with make_tracker(tmp_path) as tracker:
        tracker.log(0, Metrics({"reward/mean": 0.5}))
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    message = rf"hydra\.run\.dir={re.escape(str(tmp_path))} already holds a run"
    with pytest.raises(RunDirectoryError, match=message):
        make_tracker(tmp_path, config={"name": "another"})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_a_directory_whose_run_was_refused_at_the_start_can_be_used_again(tmp_path: Path) -> None:
    """Fails when a metrics.jsonl without a step remains."""
    with pytest.raises(RunError), make_tracker(tmp_path):
        raise RunError("no such data")
    with make_tracker(tmp_path) as tracker:
        tracker.log(0, Metrics({"reward/mean": 0.5}))
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0]
