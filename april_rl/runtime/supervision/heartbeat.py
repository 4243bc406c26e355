"""What a worker is doing, where others can read it without its help: also when it is stopped, stuck
or dead.

The record stands in memory without a name in any file system: whoever has opened it keeps it, and
nothing is left of it after the last process.
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from april_rl.runtime.memory.host import oom_counter, oom_kills

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

# Beats of all calls; of this call its beats, its start, whether it runs; engine steps; generated
# tokens; the call's name.
_RECORD = struct.Struct("<QQd?QQ32s")
_SIZE = mmap.PAGESIZE
# Not used by Ray, vLLM, torch or pebble; its handler is C code and runs in native code too.
STACKS_SIGNAL = signal.SIGUSR2


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Where a worker can be found."""

    node_id: str  # Ray's
    host: str
    pid: int
    born: str  # when the process started: another one may have the number later
    pulse_fd: int  # of its process
    stacks_fd: int  # of its process; the signal writes the stacks of all threads there
    oom_counter: str  # the file of its node that counts kills for want of memory around it
    oom_kills: int  # what that said when the worker was met


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What a worker was doing when its record was read."""

    beats: int = 0  # signs of progress since its start
    call: str = ""  # the method that runs, or ran last; empty: none yet
    is_running: bool = False
    call_beats: int = 0  # of this call
    call_s: float = 0.0  # since it began
    engine_steps: int = 0  # of all ticks
    generated_tokens: int = 0  # of all ticks


class Stat(NamedTuple):
    """Of /proc/<pid>/stat."""

    state: str  # a letter
    born: str  # clock ticks since the machine's start
    resident_pages: int


def stat_of(pid: int) -> Stat:
    """A process as it is now; OSError when there is none."""
    # The name, in brackets, may hold anything.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return Stat(state=fields[0], born=fields[19], resident_pages=int(fields[21]))


class Pulse:
    """A worker's record of itself; it writes, others read."""

    def __init__(self) -> None:
        """From now on the signal writes stacks, whatever the process is doing."""
        self._pulse_fd = os.memfd_create("april_rl_pulse")
        os.ftruncate(self._pulse_fd, _SIZE)
        self._memory = mmap.mmap(self._pulse_fd, _SIZE)
        self._stacks_fd = os.memfd_create("april_rl_stacks")
        faulthandler.register(STACKS_SIGNAL, file=self._stacks_fd, all_threads=True)
        self._beats = self._call_beats = self._engine_steps = self._generated_tokens = 0
        self._call, self._started, self._is_running = b"", time.monotonic(), False
        self._write()

    def member(self, node_id: str) -> Member:
        """Where others find it, on Ray's node `node_id`."""
        counter = oom_counter()
        return Member(
            node_id=node_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            born=stat_of(os.getpid()).born,
            pulse_fd=self._pulse_fd,
            stacks_fd=self._stacks_fd,
            oom_counter=str(counter),
            oom_kills=oom_kills(counter),
        )

    def begin(self, call: str) -> None:
        """The method `call` starts."""
        self._call, self._started, self._is_running = call.encode(), time.monotonic(), True
        self._call_beats = -1
        self.beat()

    def end(self) -> None:
        """It has ended."""
        self._is_running = False
        self.beat()

    def beat(self, *, engine_steps: int = 0, generated_tokens: int = 0) -> None:
        """A sign of progress, with what has been computed since the one before."""
        self._beats += 1
        self._call_beats += 1
        self._engine_steps += engine_steps
        self._generated_tokens += generated_tokens
        self._write()

    def counted(self, items: Iterable[T]) -> Iterator[T]:
        """The items; each one is a sign of progress."""
        for item in items:
            self.beat()
            yield item

    def _write(self) -> None:
        _RECORD.pack_into(
            self._memory,
            0,
            self._beats,
            self._call_beats,
            self._started,
            self._is_running,
            self._engine_steps,
            self._generated_tokens,
            self._call,
        )


class HasPulse(Protocol):
    """A worker."""

    pulse: Pulse


W = TypeVar("W", bound=HasPulse)


def told(method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
    """A worker's method, of which its pulse says when it runs."""

    @functools.wraps(method)
    def call(worker: W, /, *args: P.args, **kwargs: P.kwargs) -> R:
        worker.pulse.begin(method.__name__)
        try:
            return method(worker, *args, **kwargs)
        finally:
            worker.pulse.end()

    return call


class PulseReader:
    """The record of a worker of this machine; still readable when the worker is dead."""

    def __init__(self, member: Member) -> None:
        """Raises OSError when there is no such process any more."""
        with open(f"/proc/{member.pid}/fd/{member.pulse_fd}", "rb") as file:
            self._memory = mmap.mmap(file.fileno(), _SIZE, prot=mmap.PROT_READ)
        self._stacks = Path(f"/proc/{member.pid}/fd/{member.stacks_fd}")

    def activity(self) -> Activity:
        """What the worker wrote last. Read while it writes, a value may be an old one."""
        beats, call_beats, started, is_running, steps, tokens, call = _RECORD.unpack_from(
            self._memory
        )
        return Activity(
            beats=beats,
            call=call.rstrip(b"\0").decode(),
            is_running=is_running,
            call_beats=call_beats,
            call_s=time.monotonic() - started,
            engine_steps=steps,
            generated_tokens=tokens,
        )

    def num_stack_bytes(self) -> int:
        """What the signals have brought so far; 0 when the process is dead."""
        with suppress(OSError):
            return self._stacks.stat().st_size
        return 0

    def stacks_from(self, offset: int) -> str:
        """What they brought after the first `offset` bytes; empty when the process is dead."""
        with suppress(OSError):
            return self._stacks.read_bytes()[offset:].decode(errors="replace")
        return ""
