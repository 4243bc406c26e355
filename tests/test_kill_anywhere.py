"""Real runs that are ended with SIGKILL at random moments lose nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from command_line import environment
from source_tree import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine]


def test_a_run_that_is_killed_three_times_loses_no_prompt_and_trains_none_twice(tmp_path):
    """Fails when a checkpoint is half written, a step is there twice, a prompt is lost or trained
    twice, or a process stays.
    """
    args = ["--kills", "3", "--seed", "3", "--output", str(tmp_path / "killed")]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "kill_anywhere.py"), *args],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count(", at step ") == 3
    assert "3 kills, seed 3: 0 checks failed" in done.stdout
