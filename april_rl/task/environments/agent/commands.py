"""Run the commands of agents, each in a session that is killed with everything it has started."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import re
import shlex
import signal
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from april_rl.config.user_code import memory_gib

_KEPT_BYTES = 1 << 16  # the last bytes of a command's output
_SHOWN_BYTES = 2000  # the part of them that an error message shows
_DRAIN_S = 1.0  # how long to wait for the output after the command has ended
_MOST_LOOKS, _LOOK_S = 50, 0.01  # searches for orphans of a command, and the pause between two
_PR_SET_CHILD_SUBREAPER = 36
_LIMIT = "the command and each program that it starts may use user_code.memory_gib"
_OF_MEMORY = re.compile(r"memory|alloc", re.IGNORECASE)

# Process ids of running commands; the other children of this process are orphans.
_running: set[int] = set()


def adopt_orphans() -> None:
    """Become the parent of processes that commands leave behind, so that they can be found."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


async def output_of(words: Sequence[str], variables: Mapping[str, str], *, mark: str) -> str:
    """Return the end of what a command prints. `mark` is the name of the variable that marks
    programs that it has started. Raise RuntimeError when it fails.
    """
    command, transport = await _start(words, variables)
    try:
        await command.ended.wait()
    finally:
        await _kill(command, transport, f"{mark}={variables[mark]}".encode())
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            await command.closed.wait()
    transport.close()
    if status := transport.get_returncode():
        last = command.last(2)[-_SHOWN_BYTES:].strip()
        hint = f"; {_LIMIT} = {memory_gib():g}" if _OF_MEMORY.search(last) else ""
        raise RuntimeError(f"{shlex.join(words)} ended with exit code {status}: {last}{hint}")
    return command.last(1)


class _Command(asyncio.SubprocessProtocol):
    """A running command. It ends when its process does, even if others hold its pipes."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.closed = asyncio.Event()
        self._last = {1: bytearray(), 2: bytearray()}  # bytes by file descriptor

    def last(self, fd: int) -> str:
        return self._last[fd].decode(errors="replace")

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._last[fd] += data
        del self._last[fd][:-_KEPT_BYTES]

    def process_exited(self) -> None:
        self.ended.set()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.closed.set()


async def _start(
    words: Sequence[str], variables: Mapping[str, str]
) -> tuple[_Command, asyncio.SubprocessTransport]:
    # The command inherits one end of a pipe. When this process ends, the pipe sends SIGKILL to the
    # command's session.
    with open(f"/proc/self/fd/{_pipe()[0]}", "rb", buffering=0) as lifeline:
        fd = lifeline.fileno()
        transport, command = await asyncio.get_running_loop().subprocess_exec(
            _Command,
            *words,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            env={**os.environ, **variables},
            start_new_session=True,
            pass_fds=(fd,),
        )
        _running.add(transport.get_pid())
        with suppress(ProcessLookupError):  # the command has ended
            fcntl.fcntl(fd, fcntl.F_SETOWN, -transport.get_pid())
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_ASYNC)
    return command, transport


@cache
def _pipe() -> tuple[int, int]:
    return os.pipe()


async def _kill(command: _Command, transport: asyncio.SubprocessTransport, mark: bytes) -> None:
    """Kill a command with its session and the orphans with the mark; wait for their end."""
    with suppress(ProcessLookupError):
        os.killpg(transport.get_pid(), signal.SIGKILL)
    await command.ended.wait()  # afterwards its children are orphans
    _running.discard(transport.get_pid())
    for _ in range(_MOST_LOOKS):
        if sum(_kill_orphan(pid, mark) for pid in _orphans()) == 0:
            return
        await asyncio.sleep(_LOOK_S)


def _kill_orphan(pid: int, mark: bytes) -> bool:
    """Kill an orphan if it has the mark; return whether it had the mark or had just ended."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes()
        if mark in variables.split(b"\0"):
            os.kill(pid, signal.SIGKILL)
        has_ended, _ = os.waitpid(pid, os.WNOHANG)
    except OSError:  # the process is gone
        return False
    return mark in variables.split(b"\0") or bool(has_ended)


def _orphans() -> set[int]:
    """Return the children of this process that are not commands."""
    lists = (path.read_text().split() for path in Path("/proc/self/task").glob("*/children"))
    return {int(pid) for pids in lists for pid in pids} - _running
