"""A sandbox for code that a model wrote, and running code in it.

`landlock`: kernel rules against files, and a filter of system calls (seccomp.py) against the
network, signals and other processes. `none`: the filter alone, where the machine has it; the code
can read and write what the user can. Both limit time, memory, threads and output.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from april_rl.jail import seccomp
from april_rl.jail.jail import MAX_OUTPUT_BYTES

START_S = 20.0  # limit for closing a sandbox before its code runs
MAX_REPLY_BYTES = 4096
MAX_REPORT_BYTES = 1 << 20  # enough for more than ten thousand tests
ENVIRONMENT = {
    "HOME": "/nonexistent",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
SYSTEM = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
GIB = 1 << 30
PACKAGE = Path(__file__).parents[1]
BOOTSTRAP = (
    f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); "
    "from april_rl.jail.jail import main; del sys.path[0]; main(sys.argv[1:])"
)


Level = Literal["landlock", "none"]  # isolation of the code that is run


class SandboxError(RuntimeError):
    """The sandbox cannot run any code; the code is not at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A statement or test function. Set-up statements run first and are not scored."""

    source: str
    counts: bool = True

    def __str__(self) -> str:
        return f"the test {self.source.strip()!r:.80}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The result of code in a sandbox."""

    passed: tuple[int, ...]  # the numbers of the tests that count and pass
    output: str  # what a program printed, or the report of tests, to which they may have added
    # Negative: the signal that ended it; None: a limit of time or threads ended it.
    exit_code: int | None
    limit: Literal["", "cpu", "wall", "threads", "output"] = ""  # the limit that was reached
    used_s: float = 0.0  # CPU time, or, if longer, wall time less the waiting for a core


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """A level of isolation with its limits."""

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
        """Run code once, for at most `timeout_s` of CPU time and of wall time."""
        with self.start(code, timeout_s=timeout_s, tests=tests) as program:
            return program.run(stdin, wall_s=timeout_s)

    @contextmanager
    def start(
        self, code: str, *, timeout_s: float, tests: Sequence[Check] | None = None
    ) -> Iterator[Program]:
        """Start the process that can run code, and tests in its module, and end it afterwards;
        `timeout_s` is the CPU time of each run, without the start of Python.
        """
        token = secrets.token_hex()
        job = {
            "code": code,
            "tests": None if tests is None else [(test.source, test.counts) for test in tests],
            "token": token,
            "memory_bytes": int(self.memory_gib * GIB),
            "cpu_s": timeout_s,
            "landlock": self.level == "landlock",
            "seccomp": self.level == "landlock" or seccomp.is_supported(),
            "readable": readable_paths(),
        }
        control, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with control, _memory_file(json.dumps(job)) as file, tempfile.TemporaryFile() as errors:
            with other_end:
                process = self._start_process(other_end.fileno(), file.fileno(), errors)
            try:
                yield Program(
                    sandbox=self, control=control, errors=errors, token=token, tests=tests
                )
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _start_process(self, control: int, job: int, errors: IO[bytes]) -> subprocess.Popen[bytes]:
        python = [sys.executable, "-I", "-B", "-X", "utf8", "-c", BOOTSTRAP]
        try:
            return subprocess.Popen(
                [*python, *(str(number) for number in (control, job, os.getpid()))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(control, job),
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(f"A {self.level} sandbox could not start: {error}.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Code in a sandbox that is open; each run has its own process."""

    sandbox: Sandbox
    control: socket.socket
    errors: IO[bytes]
    token: str
    tests: Sequence[Check] | None

    def run(self, stdin: str = "", *, wall_s: float) -> Finished:
        """Run the code once; raise SandboxError when the sandbox does not close: nothing ran."""
        with _memory_file(stdin) as file, tempfile.TemporaryFile() as output:
            reply = self._reply(f"{wall_s:f}", file.fileno(), output.fileno(), wall_s=wall_s)
            size = os.fstat(output.fileno()).st_size
            has_tests = self.tests is not None
            printed = _text(output, MAX_REPORT_BYTES if has_tests else MAX_OUTPUT_BYTES)
        reported = set(printed.splitlines()) if has_tests else set()
        return Finished(
            passed=tuple(
                number
                for number, test in enumerate(self.tests or ())
                if test.counts and f"{self.token} {number}" in reported
            ),
            output=printed,
            exit_code=reply["exit_code"],
            limit=reply["limit"] or ("output" if size >= MAX_OUTPUT_BYTES else ""),
            used_s=reply["used_s"],
        )

    def _reply(self, request: str, *files: int, wall_s: float) -> dict[str, Any]:
        level = self.sandbox.level
        self.control.settimeout(START_S + wall_s)
        try:
            socket.send_fds(self.control, [request.encode()], files)
            text = self.control.recv(MAX_REPLY_BYTES)
        except TimeoutError:
            raise SandboxError(f"A {level} sandbox did not close within {START_S:.0f} s.") from None
        except ConnectionError:
            text = b""  # jail.py has ended without a report
        reply: dict[str, Any] = json.loads(text or '{"is_closed": false}')
        if not reply["is_closed"]:
            said = _text(self.errors).strip().splitlines() or ["it printed no error"]
            raise SandboxError(f"A {level} sandbox did not close: {said[-1]}")
        return reply


def readable_paths() -> list[str]:
    """Return what code may read: Python, its installed packages, the system's libraries."""
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    return [*SYSTEM, *DEVICES, sys.prefix, sys.base_prefix, sys.exec_prefix, *packages]


@contextmanager
def _memory_file(text: str) -> Iterator[IO[bytes]]:
    """Open a file in memory that holds a text. Code may open it again as /dev/stdin, which Landlock
    would forbid for a file on disk.
    """
    with open(os.memfd_create("text"), "w+b") as file:
        file.write(text.encode(errors="replace"))
        file.flush()
        file.seek(0)
        yield file


def _text(file: IO[bytes], longest: int = MAX_REPORT_BYTES) -> str:
    file.seek(0)
    return file.read(longest).decode(errors="replace")
