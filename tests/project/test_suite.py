"""Promises of tests/conftest.py to every test."""

import subprocess
import sys

import pytest
from source_tree import TESTS

INTERRUPTED = """
import os, pytest, signal
from april_rl.supervision import interrupts

before = signal.getsignal(signal.SIGINT)

def test_a_command_is_run_in_this_process():
    interrupts.Interrupts()

def test_its_handler_has_gone():
    assert signal.getsignal(signal.SIGINT) is before

def test_unmarked():
    sum(range(5_000_000))

@pytest.mark.slow
def test_marked():
    test_unmarked()

def test_ctrl_c_comes_while_a_command_runs():
    interrupts.Interrupts()
    os.kill(os.getpid(), signal.SIGINT)
"""
# The timer gives a run less time than this.
SLOW_END = """
def pytest_sessionfinish():
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(60)

SLOW_S = 0.05
"""


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> subprocess.CompletedProcess[str]:
    folder = tmp_path_factory.mktemp("suite")
    (folder / "conftest.py").write_text((TESTS / "conftest.py").read_text() + SLOW_END)
    (folder / "test_interrupted.py").write_text(INTERRUPTED)
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {TESTS}\nmarkers = slow: as here")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_ctrl_c_ends_the_suite_with_its_summary(interrupted) -> None:
    """Fails when a handler of a run remains, or its timer ends the process before the summary."""
    assert interrupted.returncode == 2, interrupted.stdout + interrupted.stderr
    assert "KeyboardInterrupt" in interrupted.stdout
    assert "4 passed" in interrupted.stdout


def test_slow_tests_without_the_marker_are_named_at_the_end(interrupted) -> None:
    named = [line for line in interrupted.stdout.splitlines() if line.startswith("not marked slow")]
    assert [line.rpartition("::")[2] for line in named] == ["test_unmarked"], interrupted.stdout
