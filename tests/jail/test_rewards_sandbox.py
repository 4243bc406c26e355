"""The sandbox for a model's code: its self-test, its limits, and which processes end with which."""

import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from own_process import wait_until
from source_tree import ROOT

from april_rl.jail import landlock, sandbox, seccomp
from april_rl.jail.probe import Isolation, Threat, check_isolation, check_start, probe
from april_rl.jail.sandbox import Check, Level, Sandbox, SandboxError
from april_rl.task.rewards.code.blocks import last_block

needs_landlock = pytest.mark.skipif(
    landlock.abi_version() == 0 or not seccomp.is_supported(),
    reason="this kernel has no Landlock or no system call filter",
)
LANDLOCK = Sandbox(level="landlock")
NONE = Sandbox(level="none")
LEVELS = [pytest.param("landlock", marks=needs_landlock), "none"]
# Attempts that the filter stops without Landlock. Whether files are protected depends on Landlock.
WITHOUT_LANDLOCK = set(Threat) - {Threat.WRITES, Threat.READS}


@needs_landlock
def test_landlock_stops_every_threat_of_the_self_test() -> None:
    assert check_isolation(LANDLOCK).stopped == set(Threat)


def test_without_landlock_the_filter_stops_everything_except_file_access() -> None:
    assert probe(NONE).stopped == WITHOUT_LANDLOCK


def test_the_self_test_finds_what_limits_alone_do_not_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seccomp, "is_supported", lambda: False)
    assert probe(NONE).stopped == {Threat.MEMORY, Threat.LOOPS}


@needs_landlock
@pytest.mark.parametrize(
    ("rule", "threat"),
    [
        ("s.BY_ARGUMENT = [r for r in s.BY_ARGUMENT if r[0] != (72, 25)]", Threat.SIGNALS),
        ("s.BY_ARGUMENT = [r for r in s.BY_ARGUMENT if r[0] != (157, 167)]", Threat.OUTLIVES),
        ("del s.DENIED['fremovexattr']", Threat.WRITES),
        ("del s.DENIED['socket']", Threat.NETWORK),
        ("s.BY_ARGUMENT = [r for r in s.BY_ARGUMENT if r[0] != (53, 199)]", Threat.NETWORK),
    ],
)
def test_the_self_test_finds_a_hole_in_the_filter(
    rule: str, threat: Threat, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_jail(monkeypatch, f"from april_rl.jail import seccomp as s; {rule}")
    with pytest.raises(SandboxError, match=f"does not stop {threat}.*sandbox: none"):
        check_isolation(LANDLOCK)


def test_too_little_memory_for_python_itself_is_not_blamed_on_the_code() -> None:
    with pytest.raises(SandboxError, match=r"memory_gib=0\.001; give it more"):
        check_start(Sandbox(level="none", memory_gib=0.001))


def test_the_description_names_what_is_stopped_and_what_is_not() -> None:
    isolation = Isolation(sandbox=LANDLOCK, stopped=frozenset(Threat) - {Threat.SIGNALS})
    assert isolation.describe() == (
        "The landlock sandbox stops writing files, reading files, the network, new processes, "
        "outliving the reward process, much memory, endless loops; it does not stop signals to "
        "other processes."
    )


@needs_landlock
def test_ordinary_programs_run_in_the_sandbox() -> None:
    program = """
import asyncio, random, threading, tempfile, collections, decimal, sympy, sys
thread = threading.Thread(target=print, args=("in a thread",))
thread.start()
thread.join()
asyncio.run(asyncio.sleep(0))
print(sympy.factorint(int(input())), sys.stdin.isatty(), __name__)
"""
    finished = LANDLOCK.run(program, timeout_s=20.0, stdin="12\n")
    assert (finished.exit_code, finished.output) == (
        0,
        "in a thread\n{2: 2, 3: 1} False __main__\n",
    )


def test_every_run_of_an_open_sandbox_starts_empty() -> None:
    program = "import sys\nprint(len(sys.argv), input())\nsys.argv += [0]\nsys.exit(int(input()))"
    with NONE.start(program, timeout_s=5.0) as opened:
        finished = [opened.run(f"{number}\n{number}\n", wall_s=5.0) for number in range(3)]
    assert [(f.output, f.exit_code) for f in finished] == [("1 0\n", 0), ("1 1\n", 1), ("1 2\n", 2)]


@pytest.mark.parametrize(
    "program",
    [
        "out = open(1, 'w', closefd=False)\nout.write('a')",
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)\nprint('a')",
        "import sys\nprint('a', file=sys.__stdout__)\nsys.stdout = None",
        "import atexit\natexit.register(print, 'b')\nprint('a')",
        "import threading, time\ndef late():\n    time.sleep(0.2)\n    print('b')\n"
        "threading.Thread(target=late).start()\nprint('a')",
        "import concurrent.futures as c, time\npool = c.ThreadPoolExecutor(1)\n"
        "pool.submit(lambda: (time.sleep(0.2), print('b')))\nprint('a')",
        "class A:\n    def __del__(self): self.out('b')\na = A()\na.out = print\nprint('a')",
        "print('a')\nraise SystemExit",
        "print('a')\nraise SystemExit(3)",
        "print('a')\nraise SystemExit('message')",
        "print('a')\n1 / 0",
        "print('a'",
    ],
)
def test_a_program_ends_as_in_python(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    finished = NONE.run(program, timeout_s=20.0)
    assert (finished.output, finished.exit_code) == (done.stdout.decode(), done.returncode)


def test_a_program_exits_faster_than_python_shuts_down() -> None:
    """So hundreds of cases fit into a limit. Without its exit function, a program ends as usual."""
    with NONE.start("exec(input())", timeout_s=20.0) as opened:
        short, whole = (
            statistics.median(opened.run(program, wall_s=20.0).used_s for _ in range(30))
            for program in ("pass", "import atexit; atexit._clear()")
        )
    assert short < 0.6 * whole


def test_cpu_time_and_wall_time_have_separate_limits() -> None:
    with NONE.start("exec(input())", timeout_s=0.3) as opened:
        loop = opened.run("while True: pass", wall_s=60.0)
        sleep = opened.run("import time; time.sleep(60)", wall_s=0.5)
        nap = opened.run("import time; time.sleep(0.5); print(1)", wall_s=60.0)
    assert [f.limit for f in (loop, sleep, nap)] == ["cpu", "wall", ""]
    assert (loop.exit_code, sleep.exit_code, nap.exit_code) == (None, None, 0)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count")
def test_the_time_of_a_program_excludes_waiting_for_a_core() -> None:
    """Four busy processes share a core with the sandbox; a program that sleeps does not wait for a
    core. The watcher itself may wait for a core meanwhile and then leaves out too much, so the
    longest of three times counts.
    """
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    loop = "import time\ndef work():\n    while time.process_time() < 0.4: pass\n"
    threaded = f"{loop}import threading\nt = threading.Thread(target=work)\nt.start(); t.join()"
    try:
        with NONE.start("exec(input())", timeout_s=20.0) as opened:
            start_s = time.monotonic()
            worked = opened.run(f"exec({loop + 'work()'!r})", wall_s=60.0)
            middle_s = time.monotonic()
            joined = opened.run(f"exec({threaded!r})", wall_s=60.0)
            end_s = time.monotonic()
            sleep = "import time; time.sleep(0.5)"
            slept_s = max(opened.run(sleep, wall_s=60.0).used_s for _ in range(3))
    finally:
        os.sched_setaffinity(0, allowed)
        for process in busy:
            process.kill()
            process.wait()
    assert 0.3 < worked.used_s < 0.7 * (middle_s - start_s)
    assert 0.3 < joined.used_s < 0.7 * (end_s - middle_s)
    assert slept_s > 0.4


@pytest.mark.parametrize(("num_threads", "limit"), [(40, ""), (200, "threads")])
def test_the_number_of_threads_is_limited(num_threads: int, limit: str) -> None:
    program = (
        "import threading\nthreading.stack_size(1 << 15)\nis_over = threading.Event()\n"
        f"for _ in range({num_threads}): threading.Thread(target=is_over.wait).start()\n"
        f"is_over.wait({60.0 if limit else 0.2})\nis_over.set()"
    )
    assert NONE.run(program, timeout_s=50.0).limit == limit


def test_processes_that_a_program_started_are_killed_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seccomp, "is_supported", lambda: False)
    program = "import os, time; print(os.fork() or os.getpid(), flush=True); time.sleep(60)"
    finished = NONE.run(program, timeout_s=0.5)
    assert finished.exit_code is None
    pids = [int(line) for line in finished.output.split()]
    assert pids
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_tests_that_passed_before_the_time_limit_count() -> None:
    checks = [Check(source="assert True"), Check(source="while True: pass")]
    finished = NONE.run("", timeout_s=0.5, tests=checks)
    assert (len(finished.passed), finished.exit_code) == (1, None)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_code_does_not_outlive_its_reward_process(level: Level, name: str) -> None:
    """The code ends with the process although it resets its parent-death signal, detaches, ends its
    main thread and sleeps.
    """
    stays = (
        "import ctypes, os, signal, time\n"
        "for number in {signal.SIGTERM, signal.SIGHUP, signal.SIGINT}:\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\n"
        "try:\n    os.fork()\nexcept OSError:\n    pass\n"
        "try:\n    os.setsid()\nexcept OSError:\n    pass\n"
        "import threading\nthreading.Thread(target=time.sleep, args=(600,)).start()\n"
        "ctypes.CDLL(None).syscall({'x86_64': 60, 'aarch64': 93}[os.uname().machine], 0)"
    )
    script = (
        "from april_rl.jail.sandbox import Sandbox\n"
        f"with Sandbox(level={level!r}).start({stays!r}, timeout_s=60.0) as opened:\n"
        "    opened.run(wall_s=600.0)"
    )
    scorer = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    try:
        wait_until(lambda: len(sleepers(scorer.pid)) == 2)  # these are jail.py and its child
        time.sleep(0.2)  # one of them may only have been waiting for a file
        wait_until(lambda: len(sleepers(scorer.pid)) == 2)
        started = sleepers(scorer.pid)
    finally:
        os.kill(scorer.pid, signal.Signals[name])
        scorer.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in started))


def sleepers(pid: int) -> list[int]:
    """Return the processes below this one that sleep, or in which some threads do."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # the process has ended in the meantime
            if child.status() != psutil.STATUS_RUNNING:
                found.append(child.pid)
    return found


def in_jail(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Make the process of the sandbox run `source` before anything else."""
    place = "del sys.path[0]; "
    monkeypatch.setattr(
        sandbox, "BOOTSTRAP", sandbox.BOOTSTRAP.replace(place, f"{source}; {place}")
    )


def is_alive(pid: int) -> bool:
    """Return whether a thread of a process runs; zombies do not count."""
    try:
        threads = psutil.Process(pid).threads()
        states = [psutil.Process(thread.id).status() for thread in threads]
    except psutil.NoSuchProcess:
        return False
    return any(s not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) for s in states)


def test_a_program_reads_and_prints_integers_of_any_length() -> None:
    program = last_block("```py3\nprint(int(input()) + 1)\n```")
    assert program is not None
    long = "1" * 5000
    assert NONE.run(program, timeout_s=5.0, stdin=f"{long}\n").output == f"{long[:-1]}2\n"
