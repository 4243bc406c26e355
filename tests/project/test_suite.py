"""What tests/conftest.py does for every test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from source_tree import TESTS

INTERRUPTED = """
import os, signal
from april_rl.supervision import interrupts

before = signal.getsignal(signal.SIGINT)

def test_a_command_is_run_in_this_process():
    interrupts.Interrupts()

def test_its_handler_has_gone():
    assert signal.getsignal(signal.SIGINT) is before

def test_ctrl_c_comes_while_a_command_runs():
    interrupts.Interrupts()
    os.kill(os.getpid(), signal.SIGINT)
"""
# Longer than the time that the timer gives a run.
SLOW_END = """
def pytest_sessionfinish():
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(60)
"""


def test_ctrl_c_ends_the_suite_with_its_summary(tmp_path: Path) -> None:
    """Fails when a handler of a run stays, or its timer ends the process before the summary."""
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text() + SLOW_END)
    (tmp_path / "test_interrupted.py").write_text(INTERRUPTED)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "KeyboardInterrupt" in done.stdout
    assert "2 passed" in done.stdout
