"""Sandboxes for code that a model wrote: three levels, and running code in one.

Strongest first: `bubblewrap` (namespaces: the code sees only Python's files, no network and no
other process), `landlock` (kernel rules against the same), `rlimits` (limits of time, memory and
output; nothing is hidden). The first two also filter system calls (seccomp.py), and bubblewrap
applies Landlock inside if the kernel has it.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO

import april_rl
from april_rl.errors import RunError
from april_rl.rewards.builtin import landlock, seccomp
from april_rl.rewards.builtin.jail import MAX_OUTPUT_BYTES

START_S = 20.0  # limit for closing a sandbox before its code runs
SLACK_PROCESSES = 64  # new processes allowed where they cannot be forbidden
GIB = 1 << 30
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/nonexistent",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
SYSTEM = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
PACKAGE = Path(april_rl.__file__).parent
BOOTSTRAP = (
    f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); "
    "from april_rl.rewards.builtin.jail import main; del sys.path[0]; main(sys.argv[1:])"
)


class SandboxError(RunError, RuntimeError):
    """The sandbox could not run code, whatever the code is."""


class Level(StrEnum):
    """How code is isolated, strongest first."""

    BUBBLEWRAP = "bubblewrap"
    LANDLOCK = "landlock"
    RLIMITS = "rlimits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A statement or function of the tests; one that does not count prepares those after it."""

    source: str
    counts: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The result of code in a sandbox."""

    num_passed: int  # tests that count
    output: str  # what a program printed; empty when tests ran
    exit_code: int | None  # negative: the signal that ended it; None: it ran out of time


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The open files between a run and its sandbox; they have no names."""

    job: IO[bytes] = field(default_factory=tempfile.TemporaryFile)
    stdin: IO[bytes] = field(default_factory=tempfile.TemporaryFile)
    stdout: IO[bytes] = field(default_factory=tempfile.TemporaryFile)
    report: IO[bytes] = field(default_factory=tempfile.TemporaryFile)
    errors: IO[bytes] = field(default_factory=tempfile.TemporaryFile)

    def close(self) -> None:
        """Close all of them, which deletes them."""
        for file in (self.job, self.stdin, self.stdout, self.report, self.errors):
            file.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """A level of isolation with its limits; every run has its own process."""

    level: Level
    memory_gib: float = 1.0  # address space, with Python and its libraries

    def run(
        self,
        code: str,
        *,
        timeout_s: float,
        tests: Sequence[Check] | None = None,
        stdin: str = "",
    ) -> Finished:
        """Run code and tests in its module, or, without tests, a program that reads `stdin`.

        `timeout_s` of wall time start when the sandbox is closed; at their end everything in its
        session is killed. Raise SandboxError when the sandbox does not close; nothing has run then.
        """
        job = self._job(code, tests, timeout_s=timeout_s)
        files = Files()
        try:
            _fill(files.job, json.dumps(job))
            _fill(files.stdin, stdin)
            with self._started(files, has_tests=tests is not None) as (process, ready):
                exit_code = self._wait(process, ready, timeout_s=timeout_s, errors=files.errors)
            passed = set(_text(files.report).splitlines())
            return Finished(
                num_passed=sum(
                    f"{job['token']} {number}" in passed for number in range(len(tests or ()))
                ),
                output=_text(files.stdout),
                exit_code=exit_code,
            )
        finally:
            files.close()

    def _job(
        self, code: str, tests: Sequence[Check] | None, *, timeout_s: float
    ) -> dict[str, object]:
        """Return what jail.py reads."""
        is_isolated = self.level is not Level.RLIMITS
        has_filter = is_isolated and seccomp.is_supported()
        return {
            "code": code,
            "tests": None if tests is None else [(test.source, test.counts) for test in tests],
            "token": secrets.token_hex(),
            "memory_bytes": int(self.memory_gib * GIB),
            "cpu_s": math.ceil(timeout_s) + 1,
            "max_processes": None if has_filter else _num_threads_of_user() + SLACK_PROCESSES,
            "landlock": is_isolated and landlock.abi_version() > 0,
            "seccomp": has_filter,
            "readable": readable_paths(),
        }

    @contextmanager
    def _started(
        self, files: Files, *, has_tests: bool
    ) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
        """Start the process, with a pipe that gets a byte when its sandbox is closed; kill its
        session in the end.
        """
        ready, ready_end = os.pipe()
        passed_on = (files.job.fileno(), ready_end, files.report.fileno())
        wrapper = bubblewrap() if self.level is Level.BUBBLEWRAP else []
        python = [sys.executable, "-I", "-B", "-X", "utf8", "-c", BOOTSTRAP]
        try:
            process = subprocess.Popen(
                [*wrapper, *python, *(str(number) for number in passed_on)],
                stdin=subprocess.DEVNULL if has_tests else files.stdin,
                stdout=subprocess.DEVNULL if has_tests else files.stdout,
                stderr=files.errors,
                pass_fds=passed_on,
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            os.close(ready)
            raise SandboxError(f"A {self.level} sandbox could not start: {error}.") from error
        finally:
            os.close(ready_end)
        try:
            yield process, ready
        finally:
            os.close(ready)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _wait(
        self,
        process: subprocess.Popen[bytes],
        ready: int,
        *,
        timeout_s: float,
        errors: IO[bytes],
    ) -> int | None:
        """Return the exit code when the code has ended; None when it ran out of time."""
        if not _has_come(ready, START_S):
            raise SandboxError(f"A {self.level} sandbox did not close within {START_S:.0f} s.")
        if not os.read(ready, 1):
            said = _text(errors).strip().splitlines() or ["it printed no error"]
            raise SandboxError(f"A {self.level} sandbox did not close: {said[-1]}")
        end = os.pidfd_open(process.pid)
        try:
            return process.wait() if _has_come(end, timeout_s) else None
        finally:
            os.close(end)


def readable_paths() -> list[str]:
    """Return what code may read: Python, its installed packages, the system's libraries."""
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    return [*SYSTEM, *DEVICES, sys.prefix, sys.base_prefix, sys.exec_prefix, *packages]


def bubblewrap() -> list[str]:
    """Return the command that runs another one without other files than the readable ones, without
    network and other processes; raise SandboxError without bubblewrap.
    """
    command = shutil.which("bwrap")
    if command is None:
        raise SandboxError("bwrap is not on PATH; install bubblewrap.")
    binds: list[str] = []
    for path in dict.fromkeys([*readable_paths(), str(PACKAGE)]):
        how = "--dev-bind-try" if path in DEVICES else "--ro-bind-try"
        binds += [how, path, path]
    flags = ["--unshare-all", "--die-with-parent", "--cap-drop", "ALL"]
    return [command, *flags, *binds, "--remount-ro", "/", "--chdir", "/", "--"]


def _num_threads_of_user() -> int:
    """Return how many threads this user has, all of which count for RLIMIT_NPROC."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if process.stat().st_uid == os.getuid():
                total += len(list((process / "task").iterdir()))
    return total


def _fill(file: IO[bytes], text: str) -> None:
    """Write a file and rewind it."""
    file.write(text.encode(errors="replace"))
    file.flush()
    file.seek(0)


def _text(file: IO[bytes]) -> str:
    """Return the text in a file, replacing invalid bytes."""
    file.seek(0)
    return file.read(MAX_OUTPUT_BYTES).decode(errors="replace")


def _has_come(descriptor: int, timeout_s: float) -> bool:
    """Wait until there is something to read; return whether there is."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
