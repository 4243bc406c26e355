"""The process that runs the code of a response: it closes its sandbox, reports that, and runs the
code.

`sandbox.py` starts it with `python -I -c`. Standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import types
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from april_rl.rewards.builtin import landlock, seccomp

PR_SET_PDEATHSIG = 1
CAPABILITY_VERSION_3 = 0x20080522
MAX_OUTPUT_BYTES = 16 << 20  # per file, and so of all that is printed
MAX_OPEN_FILES = 64
SOLUTION = "solution"  # the name of the response as a module, for tests that import it


def main(arguments: Sequence[str]) -> None:
    """Read a job (JSON) from the first file descriptor, close the sandbox and run the code.

    Write one byte to the second descriptor when the sandbox is closed, and a line `token number` to
    the third for every test that passes.
    """
    job_file, ready, report = (int(number) for number in arguments)
    with open(job_file, "rb") as file:
        job = json.load(file)
    lock_in(job)
    os.write(ready, b"r")
    os.close(ready)
    sys.argv = [SOLUTION]
    if job["tests"] is None:
        os.close(report)
        exec(compile(job["code"], SOLUTION, "exec"), {"__name__": "__main__"})
        return
    run_tests(job["code"], job["tests"], f"{job['token']} {{}}\n", report=report)


def run_tests(code: str, tests: Sequence[Sequence[Any]], line: str, *, report: int) -> None:
    """Run the response as the module `solution`, then the statements of the tests in it, and exit.

    A test is (source, whether it counts). Write `line` with its number for every test that counts
    and passes. Stop when one that does not count fails, since the tests after it build on it.
    """
    solution = types.ModuleType(SOLUTION)
    sys.modules[SOLUTION] = solution
    if not _is_run(code, vars(solution)):
        os._exit(1)
    for number, (source, counts) in enumerate(tests):
        has_passed = _is_run(source, vars(solution))
        if has_passed and counts:
            os.write(report, line.format(number).encode())
        if not (has_passed or counts):
            break
    os._exit(0)  # without waiting for threads that the response left


def lock_in(job: dict[str, Any]) -> None:
    """Apply all restrictions of the job, from resource limits to the system call filter."""
    die_with_parent()
    _limit(resource.RLIMIT_AS, job["memory_bytes"])
    _limit(resource.RLIMIT_CPU, job["cpu_s"])
    _limit(resource.RLIMIT_FSIZE, MAX_OUTPUT_BYTES)
    _limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    _limit(resource.RLIMIT_CORE, 0)
    if job["max_processes"] is not None:
        _limit(resource.RLIMIT_NPROC, job["max_processes"])
    silent = os.open(os.devnull, os.O_WRONLY)
    drop_capabilities()
    if job["landlock"]:
        landlock.allow_reading_only(job["readable"])
    if job["seccomp"]:
        seccomp.deny_escapes()
    os.dup2(silent, 2)  # until here, standard error is for why the sandbox did not close
    os.close(silent)


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends."""
    landlock.checked(landlock.libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def drop_capabilities() -> None:
    """Drop every capability: root has them, and Landlock does not restrict them."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable, two words each
    landlock.checked(landlock.libc.capset(ctypes.byref(header), ctypes.byref(nothing)))


def _limit(kind: int, wanted: int) -> None:
    """Lower a resource limit unless it is lower already."""
    hard = resource.getrlimit(kind)[1]
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (allowed, allowed))


def _is_run(source: str, namespace: dict[str, Any]) -> bool:
    """Return whether the source runs to its end without raising anything, not even SystemExit."""
    with suppress(BaseException):
        exec(compile(source, SOLUTION, "exec"), namespace)
        return True
    return False
