"""Watch the worker processes of one machine from outside; at the end kill the ones left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from april_rl.run.supervision.heartbeat import (
    STACKS_SIGNAL,
    Activity,
    HeartbeatReader,
    ProcessStat,
    WorkerProcess,
    read_stat,
)
from april_rl.run.supervision.host_memory import HostMemory, host_memory, oom_kills

_LOG_TAIL_BYTES = 4096
_WORKERS_END_S = 0.5
_CHILDREN_END_S = 1.0
_POLL_S = 0.05
_DEAD, _STOPPED = "ZX", "T"  # states in /proc/<pid>/stat
NO_REPLY = "?"  # state of a process on a node that does not reply


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """A worker's process: its state and activity, its memory and that of its node."""

    state: str  # the letter in /proc/<pid>/stat; empty: the process is dead; or NO_REPLY
    rss_bytes: int  # resident memory; 0 when the process is dead
    activity: Activity
    node_memory: HostMemory  # memory of the node, or of the container or job on it; 0: unknown
    # Processes near it that the kernel killed for lack of memory while the watchdog watched.
    oom_kills: int

    @property
    def is_dead(self) -> bool:
        return not self.state

    @property
    def is_stopped(self) -> bool:
        """Return whether a signal has stopped the process; a debugger sets another state."""
        return self.state == _STOPPED


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTrace:
    """Facts of a worker's process for the report."""

    stacks: str
    log_tail: str  # the last lines that the process wrote to stderr


class NodeMonitor:
    """Watches workers on its own machine; needs no reply from them."""

    def __init__(self, processes: Sequence[WorkerProcess]) -> None:
        """Watch `processes`, all on this machine; every result is in their order."""
        self._watched = [_WatchedProcess(process) for process in processes]
        self._workers: list[psutil.Process] = []
        self._children: list[psutil.Process] = []

    def statuses(self) -> list[ProcessStatus]:
        """Return the status of each worker; takes about a millisecond."""
        node_memory = host_memory()
        return [watched.status(node_memory) for watched in self._watched]

    def collect_traces(self, wait_s: float) -> list[WorkerTrace]:
        """Return stacks and log tail of each worker within about `wait_s`. A stopped process
        is continued, since only then can it write where it was stopped.
        """
        asked = [watched.request_stacks() for watched in self._watched]
        deadline = time.monotonic() + wait_s
        missing = {i for i, was_asked in enumerate(asked) if was_asked}
        while missing and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            missing = {i for i in missing if not self._watched[i].has_stacks()}
        if any(asked):
            time.sleep(2 * _POLL_S)  # a long dump is written thread by thread, so wait for more
        return [WorkerTrace(stacks=w.stacks(), log_tail=w.log_tail()) for w in self._watched]

    def find_processes(self) -> None:
        """Note the processes that `kill_processes` kills, while their children can be found."""
        found = [process for watched in self._watched for process in watched.processes()]
        self._workers = [process for process, is_child in found if not is_child]
        self._children = [process for process, is_child in found if is_child]

    def kill_processes(self) -> None:
        """Kill the noted workers that are left, then their children, which may clean up first."""
        _kill(psutil.wait_procs(self._workers, timeout=_WORKERS_END_S)[1])
        _kill(psutil.wait_procs(self._children, timeout=_CHILDREN_END_S)[1])


class _WatchedProcess:
    def __init__(self, process: WorkerProcess) -> None:
        self._pid, self._start_ticks = process.pid, process.start_ticks
        # The initial count comes with the process, because Ray may restart this monitor.
        self._oom_counter, self._oom_kills = Path(process.oom_counter), process.oom_kills
        self._heartbeat: HeartbeatReader | None = None
        self._log, self._offset = "", 0
        with suppress(OSError):  # the process may be dead already
            self._heartbeat = HeartbeatReader(process)
            self._log = os.readlink(f"/proc/{process.pid}/fd/2")

    def status(self, node_memory: HostMemory) -> ProcessStatus:
        stat = self._stat()
        return ProcessStatus(
            state=stat.state if stat else "",
            rss_bytes=stat.resident_pages * os.sysconf("SC_PAGE_SIZE") if stat else 0,
            activity=self._heartbeat.activity() if self._heartbeat else Activity(),
            node_memory=node_memory,
            oom_kills=max(0, oom_kills(self._oom_counter) - self._oom_kills),
        )

    def _stat(self) -> ProcessStat | None:
        with suppress(OSError):
            stat = read_stat(self._pid)
            if stat.start_ticks == self._start_ticks and stat.state not in _DEAD:
                return stat
        return None

    def request_stacks(self) -> bool:
        """Ask the process to write its stacks; return False when it cannot."""
        stat = self._stat()
        if stat is None or self._heartbeat is None:
            return False
        self._offset = len(self._heartbeat.stacks())
        with suppress(ProcessLookupError):
            os.kill(self._pid, STACKS_SIGNAL)
            if stat.state == _STOPPED:
                os.kill(self._pid, signal.SIGCONT)
        return True

    def has_stacks(self) -> bool:
        return self._heartbeat is None or len(self._heartbeat.stacks()) > self._offset

    def stacks(self) -> str:
        """Return the stacks that were requested last, or a line that says why there are none."""
        if self._heartbeat is None or (self._stat() is None and not self.has_stacks()):
            return "no stacks: the process is dead\n"
        if not self.has_stacks():
            with suppress(OSError):
                where = Path(f"/proc/{self._pid}/wchan").read_text() or "unknown"
                return f"no stacks: the process does not react; kernel function: {where}\n"
        return self._heartbeat.stacks()[self._offset :].decode(errors="replace")

    def log_tail(self) -> str:
        """Return the end of its stderr; empty when that is not a file or cannot be read."""
        path = Path(self._log)
        with suppress(OSError):
            if path.is_file():
                with path.open("rb") as file:
                    file.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
                    return file.read().decode(errors="replace")
        return ""

    def processes(self) -> list[tuple[psutil.Process, bool]]:
        """Return the process and its children, which may outlive it; True marks a child."""
        with suppress(psutil.NoSuchProcess, OSError):
            # Otherwise the pid was reused.
            if read_stat(self._pid).start_ticks == self._start_ticks:
                worker = psutil.Process(self._pid)
                children = [(child, True) for child in worker.children(recursive=True)]
                return [(worker, False), *children]
        return []


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
