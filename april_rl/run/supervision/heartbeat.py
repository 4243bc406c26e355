"""A worker's record of its activity, in shared memory. Other processes read it without the worker's
help, even if it is busy, stopped, hung or dead.

The memory has no name in any file system, so nothing is left of it once the last process that has
it open is gone.
"""

from __future__ import annotations

import faulthandler
import functools
import mmap
import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from april_rl.run.supervision.host_memory import oom_counter, oom_kills

P = ParamSpec("P")
R = TypeVar("R")

# Beats of all calls; of the current call its beats, its start, whether it is running, its name.
_RECORD = struct.Struct("<QQd?32s")
_SIZE = mmap.PAGESIZE
# Ray, vLLM, torch and pebble do not use this signal. Its handler is C code, so it also runs
# while the process is inside native code.
STACKS_SIGNAL = signal.SIGUSR2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProcess:
    """Address of a worker's process, with its heartbeat and its stacks."""

    node_id: str  # Ray's
    host: str
    pid: int
    start_ticks: str  # when the process started, because the kernel may reuse its pid
    heartbeat_fd: int  # file descriptor in the worker's process
    # File descriptor in the worker's process; on STACKS_SIGNAL it writes all threads' stacks there.
    stacks_fd: int
    oom_counter: str  # the file on its node that counts out-of-memory kills around the worker
    oom_kills: int  # the value of that counter when the watchdog began to watch


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """A worker's activity when its heartbeat was read."""

    beats: int = 0  # signs of progress since the process started
    call: str = ""  # the method that is running, or that ran last; empty: none so far
    is_running: bool = False
    call_beats: int = 0  # signs of progress in this call
    call_s: float = 0.0  # duration of this call so far


class ProcessStat(NamedTuple):
    """Fields of /proc/<pid>/stat."""

    state: str  # one letter
    start_ticks: str  # clock ticks since the machine booted
    resident_pages: int


def read_stat(pid: int) -> ProcessStat:
    """Return the current state of a process; raise OSError when there is no such process."""
    # The second field is the program's name in parentheses, which may contain spaces.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return ProcessStat(state=fields[0], start_ticks=fields[19], resident_pages=int(fields[21]))


class Heartbeat:
    """The record of one worker, written by the worker itself."""

    def __init__(self) -> None:
        self._heartbeat_fd = os.memfd_create("april_rl_heartbeat")
        os.ftruncate(self._heartbeat_fd, _SIZE)
        self._memory = mmap.mmap(self._heartbeat_fd, _SIZE)
        self._stacks_fd = os.memfd_create("april_rl_stacks")
        faulthandler.register(STACKS_SIGNAL, file=self._stacks_fd, all_threads=True)
        self._beats = self._call_beats = 0
        self._call, self._started, self._is_running = b"", time.monotonic(), False
        self._write()

    def process(self, node_id: str) -> WorkerProcess:
        """Return where the monitor of Ray's node `node_id` finds this process and its heartbeat."""
        counter = oom_counter()
        return WorkerProcess(
            node_id=node_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            start_ticks=read_stat(os.getpid()).start_ticks,
            heartbeat_fd=self._heartbeat_fd,
            stacks_fd=self._stacks_fd,
            oom_counter=str(counter),
            oom_kills=oom_kills(counter),
        )

    def begin_call(self, call: str) -> None:
        """Record that the method `call` starts."""
        self._call, self._started, self._is_running = call.encode(), time.monotonic(), True
        self._call_beats = -1
        self.beat()

    def end_call(self) -> None:
        """Record that the method has ended."""
        self._is_running = False
        self.beat()

    def beat(self) -> None:
        """Record progress."""
        self._beats += 1
        self._call_beats += 1
        self._write()

    def _write(self) -> None:
        _RECORD.pack_into(
            self._memory,
            0,
            self._beats,
            self._call_beats,
            self._started,
            self._is_running,
            self._call,
        )


class HasHeartbeat(Protocol):
    """A worker that records its activity."""

    heartbeat: Heartbeat


W = TypeVar("W", bound=HasHeartbeat)


def records_activity(method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
    """Record the start and the end of a worker's method in its heartbeat."""

    @functools.wraps(method)
    def call(worker: W, /, *args: P.args, **kwargs: P.kwargs) -> R:
        worker.heartbeat.begin_call(method.__name__)
        try:
            return method(worker, *args, **kwargs)
        finally:
            worker.heartbeat.end_call()

    return call


class HeartbeatReader:
    """The heartbeat of a worker on this machine; stays readable when the worker has died."""

    def __init__(self, process: WorkerProcess) -> None:
        """Open the heartbeat. Raise OSError when the process is gone already."""
        with open(f"/proc/{process.pid}/fd/{process.heartbeat_fd}", "rb") as file:
            self._memory = mmap.mmap(file.fileno(), _SIZE, prot=mmap.PROT_READ)
        self._stacks = Path(f"/proc/{process.pid}/fd/{process.stacks_fd}")

    def activity(self) -> Activity:
        """Return the last record of the worker; a field may be one beat old."""
        beats, call_beats, started, is_running, call = _RECORD.unpack_from(self._memory)
        return Activity(
            beats=beats,
            call=call.rstrip(b"\0").decode(),
            is_running=is_running,
            call_beats=call_beats,
            call_s=time.monotonic() - started,
        )

    def stacks(self) -> bytes:
        """Return all stacks written so far; empty when the process has died."""
        with suppress(OSError):
            return self._stacks.read_bytes()
        return b""
