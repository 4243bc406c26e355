"""The processes of the workers of one machine, seen from outside: alive or not, their memory, their
stacks, their end.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from april_rl.runtime.memory.host import host_memory, oom_kills
from april_rl.runtime.supervision.heartbeat import (
    STACKS_SIGNAL,
    Activity,
    Member,
    PulseReader,
    stat_of,
)

_LOG_TAIL_BYTES = 4096
_WORKERS_END_S = 0.5
_CHILDREN_END_S = 1.0
_POLL_S = 0.05
_DEAD = "ZX"
UNSEEN = "?"  # in the place of a state


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """How a worker's process is."""

    state: str  # the letter of /proc/<pid>/stat; empty: there is no process; or UNSEEN
    rss_bytes: int  # 0 when it is dead
    activity: Activity

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended."""
        return not self.state

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it; a debugger does so in another way."""
        return self.state == "T"


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What is worth telling of a worker whose group has failed."""

    stacks: str
    log_tail: str  # the end of what its process wrote to stderr


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The memory of a node, or of the container or job on it."""

    total_bytes: int  # 0: it is not known
    free_bytes: int
    oom_kills: int  # processes the kernel has killed for want of it since the workers were met


class Sentry:
    """Watches workers of its own machine; needs nothing of them but their process id."""

    def __init__(self, members: Sequence[Member]) -> None:
        """Those of this machine, in an order that all answers keep."""
        self._watched = [_Watched(member) for member in members]
        self._workers: list[psutil.Process] = []
        self._children: list[psutil.Process] = []

    def look(self) -> list[Vitals]:
        """Of each worker; takes microseconds."""
        return [watched.vitals() for watched in self._watched]

    def machine(self) -> Machine:
        """Memory as it is now."""
        memory = host_memory()
        # Counted from what each member says: a sentry may have been started anew since.
        kills = max((watched.oom_kills() for watched in self._watched), default=0)
        return Machine(total_bytes=memory.total, free_bytes=memory.free, oom_kills=kills)

    def findings(self, wait_s: float) -> list[Findings]:
        """Of each worker, within `wait_s`. A stopped process is let go on: it writes its stacks
        where it was stopped.
        """
        asked = [watched.ask_for_stacks() for watched in self._watched]
        deadline = time.monotonic() + wait_s
        missing = {i for i, was_asked in enumerate(asked) if was_asked}
        while missing and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            missing = {i for i in missing if not self._watched[i].has_stacks()}
        if any(asked):
            time.sleep(2 * _POLL_S)  # the other threads of a long dump
        return [Findings(stacks=w.stacks(), log_tail=w.log_tail()) for w in self._watched]

    def mark(self) -> None:
        """Note which processes `end` is to end, while children can still be found."""
        found = [process for watched in self._watched for process in watched.processes()]
        self._workers = [process for process, is_child in found if not is_child]
        self._children = [process for process, is_child in found if is_child]

    def end(self) -> None:
        """SIGKILL to the marked workers that have not gone by themselves, and to what is left of
        their children a moment later: some of them clean up after a worker.
        """
        _kill(psutil.wait_procs(self._workers, timeout=_WORKERS_END_S)[1])
        _kill(psutil.wait_procs(self._children, timeout=_CHILDREN_END_S)[1])


class _Watched:
    """One worker."""

    def __init__(self, member: Member) -> None:
        self._pid, self._born, self._reader = member.pid, member.born, None
        self._log, self._offset = "", 0
        self._oom_counter, self._oom_kills = Path(member.oom_counter), member.oom_kills
        with suppress(OSError):  # it may be dead already
            self._reader = PulseReader(member)
            self._log = os.readlink(f"/proc/{member.pid}/fd/2")

    def vitals(self) -> Vitals:
        activity = self._reader.activity() if self._reader else Activity()
        with suppress(OSError):
            stat = stat_of(self._pid)
            if stat.born == self._born and stat.state not in _DEAD:
                rss_bytes = stat.resident_pages * os.sysconf("SC_PAGE_SIZE")
                return Vitals(state=stat.state, rss_bytes=rss_bytes, activity=activity)
        return Vitals(state="", rss_bytes=0, activity=activity)

    def oom_kills(self) -> int:
        """Around it, since it was met."""
        return max(0, oom_kills(self._oom_counter) - self._oom_kills)

    def ask_for_stacks(self) -> bool:
        """Whether it can answer."""
        vitals = self.vitals()
        if vitals.is_dead or self._reader is None:
            return False
        self._offset = self._reader.num_stack_bytes()
        with suppress(ProcessLookupError):
            os.kill(self._pid, STACKS_SIGNAL)
            if vitals.is_stopped:
                os.kill(self._pid, signal.SIGCONT)
        return True

    def has_stacks(self) -> bool:
        return self._reader is None or self._reader.num_stack_bytes() > self._offset

    def stacks(self) -> str:
        """What the last question brought, or why there is nothing."""
        if self._reader is None or (self.vitals().is_dead and not self.has_stacks()):
            return "no stacks: the process is dead\n"
        if not self.has_stacks():
            with suppress(OSError):
                where = Path(f"/proc/{self._pid}/wchan").read_text() or "nothing"
                return f"no stacks: the process does not answer; the kernel has it in {where}\n"
        return self._reader.stacks_from(self._offset)

    def log_tail(self) -> str:
        """The end of its stderr; empty when that is no file, or cannot be read."""
        path = Path(self._log)
        with suppress(OSError):
            if path.is_file():
                with path.open("rb") as file:
                    file.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
                    return file.read().decode(errors="replace")
        return ""

    def processes(self) -> list[tuple[psutil.Process, bool]]:
        """It and its children, which may outlive it, with whether each is a child."""
        with suppress(psutil.NoSuchProcess, OSError):
            if stat_of(self._pid).born == self._born:  # else another process has the number
                worker = psutil.Process(self._pid)
                children = [(child, True) for child in worker.children(recursive=True)]
                return [(worker, False), *children]
        return []


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
