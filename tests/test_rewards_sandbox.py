"""The sandbox for code of a model: self-test, limits, and refusal where nothing isolates."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from source_tree import ROOT

from april_rl.rewards.builtin import landlock, seccomp
from april_rl.rewards.builtin.probe import (
    ISOLATION,
    Isolation,
    Threat,
    check_start,
    probe,
    strongest,
)
from april_rl.rewards.builtin.sandbox import Check, Level, Sandbox, SandboxError

needs_landlock = pytest.mark.skipif(
    landlock.abi_version() == 0 or not seccomp.is_supported(),
    reason="this kernel has no Landlock or no system call filter",
)
LANDLOCK = Sandbox(level=Level.LANDLOCK)
RLIMITS = Sandbox(level=Level.RLIMITS)


@needs_landlock
def test_landlock_stops_every_threat_of_the_self_test() -> None:
    isolation = probe(LANDLOCK)
    assert isolation.stopped >= ISOLATION | {Threat.FORKS, Threat.MEMORY, Threat.LOOPS}
    assert isolation.is_safe


def test_too_little_memory_for_python_itself_is_not_the_codes_fault() -> None:
    with pytest.raises(SandboxError, match=r"memory_gib=0\.001; give it more"):
        check_start(Sandbox(level=Level.RLIMITS, memory_gib=0.001))


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="there is no bubblewrap")
def test_bubblewrap_stops_every_threat_of_the_self_test() -> None:
    try:
        isolation = probe(Sandbox(level=Level.BUBBLEWRAP))
    except SandboxError as error:
        pytest.skip(f"bubblewrap does not work here: {error}")
    assert isolation.stopped >= ISOLATION | {Threat.MEMORY, Threat.LOOPS}


def test_the_self_test_sees_what_limits_alone_let_pass() -> None:
    isolation = probe(RLIMITS)
    assert not isolation.stopped & ISOLATION
    assert isolation.stopped >= {Threat.MEMORY, Threat.LOOPS}
    assert not isolation.is_safe


def test_without_isolation_code_is_refused_with_the_remedy() -> None:
    with pytest.raises(SandboxError, match=r"does not stop writing files.*sandbox: none"):
        strongest([Level.RLIMITS], memory_gib=1.0)


def test_a_level_that_is_not_there_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SandboxError, match="bwrap is not on PATH"):
        strongest([Level.BUBBLEWRAP], memory_gib=1.0)


def test_the_description_names_what_is_stopped_and_what_is_not() -> None:
    isolation = Isolation(sandbox=LANDLOCK, stopped=frozenset(Threat) - {Threat.SIGNALS})
    assert isolation.describe() == (
        "The landlock sandbox stops writing files, reading files, the network, many processes, "
        "much memory, endless loops; it does not stop signals to other processes."
    )


@needs_landlock
@pytest.mark.parametrize(
    "attempt",
    [
        "import os; os.execv('/usr/bin/id', ['id'])",
        "import os; os.kill(os.getppid(), 0)",
        "import os; os.chmod('/tmp', 0o777)",
        "import os; os.listdir('/proc')",
        "import subprocess; subprocess.run(['id'])",
        "import socket; socket.socket(socket.AF_UNIX)",
        "import ctypes; assert ctypes.CDLL(None).syscall(425, 1, ctypes.c_buffer(120)) >= 0",
        "import resource, os; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
    ],
)
def test_known_ways_around_the_sandbox_fail(attempt: str) -> None:
    assert LANDLOCK.run(attempt, timeout_s=5.0).exit_code != 0


@needs_landlock
def test_ordinary_programs_run_in_the_sandbox() -> None:
    program = """
import random, threading, tempfile, collections, decimal, sympy
thread = threading.Thread(target=print, args=("in a thread",))
thread.start()
thread.join()
print(sympy.factorint(int(input())))
"""
    finished = LANDLOCK.run(program, timeout_s=20.0, stdin="12\n")
    assert (finished.exit_code, finished.output) == (0, "in a thread\n{2: 2, 3: 1}\n")


def test_endless_output_is_cut_and_ends_the_program() -> None:
    finished = RLIMITS.run("while True: print('x' * 100000)", timeout_s=10.0)
    assert finished.exit_code not in (0, None)
    assert len(finished.output) <= 16 << 20


def test_what_a_killed_program_started_is_killed_too() -> None:
    program = "import os, time; print(os.fork() or os.getpid(), flush=True); time.sleep(60)"
    finished = RLIMITS.run(program, timeout_s=0.5)
    assert finished.exit_code is None
    pids = [int(line) for line in finished.output.split()]
    assert pids
    _wait_until(lambda: not any(_is_alive(pid) for pid in pids))


def test_tests_that_passed_before_the_time_was_over_count() -> None:
    checks = [Check(source="assert True"), Check(source="while True: pass")]
    finished = RLIMITS.run("", timeout_s=0.5, tests=checks)
    assert (finished.num_passed, finished.exit_code) == (1, None)


@pytest.mark.parametrize(
    "code", ["import os; os._exit(0)", "raise SystemExit(0)", "import sys; sys.exit()"]
)
def test_a_program_that_exits_early_passes_no_test(code: str) -> None:
    assert RLIMITS.run(code, timeout_s=5.0, tests=[Check(source="assert False")]).num_passed == 0
    assert RLIMITS.run(code, timeout_s=5.0, tests=[Check(source="assert True")]).num_passed == 0


def test_a_sandbox_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    written = tmp_path / "pid"
    endless = (
        f"import os\nopen({str(written)!r}, 'w').write(str(os.getpid()) + ' ')\nwhile True: pass"
    )
    script = (
        "from april_rl.rewards.builtin.sandbox import Level, Sandbox\n"
        f"Sandbox(level=Level.RLIMITS).run({endless!r}, timeout_s=60.0)"
    )
    scorer = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    _wait_until(lambda: written.exists() and written.read_text().endswith(" "))
    scorer.kill()
    scorer.wait()
    _wait_until(lambda: not _is_alive(int(written.read_text())))


def _wait_until(condition: Callable[[], bool]) -> None:
    """Wait ten seconds at most for something to become true."""
    deadline_s = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and not been waited for does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False
