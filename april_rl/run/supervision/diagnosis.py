"""Finds the worker that is at fault when a run fails, and names it in the error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from april_rl.run.supervision.failures import (
    CallFailure,
    WorkerDiedError,
    WorkerMemoryError,
    WorkerStalledError,
    memory_advice,
)
from april_rl.run.supervision.heartbeat import WorkerProcess
from april_rl.run.supervision.node_monitor import ProcessStatus

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSnapshot:
    """State of every worker at one moment, by rank; empty before workers are watched."""

    processes: Sequence[WorkerProcess]
    statuses: Sequence[ProcessStatus]
    peak_rss_bytes: Sequence[int]

    def worker_name(self, rank: int | None) -> str:
        """Return rank, pid and host as far as they are known."""
        if rank is None:
            return "a worker"
        if not self.processes:
            return f"worker {rank}"
        process = self.processes[rank]
        return f"worker {rank} (pid {process.pid} on {process.host})"

    def call(self, rank: int | None) -> str:
        return "" if rank is None or not self.statuses else self.statuses[rank].activity.call

    def in_call(self, rank: int | None) -> str:
        """Return which call the worker runs or ran last, as a phrase."""
        call = self.call(rank)
        return f"in {call}" if call else "during start-up"

    def moment(self, rank: int) -> str:
        """Return in or after which call the worker is."""
        activity = self.statuses[rank].activity
        if not activity.call:
            return "before its first call"
        return f"{'in' if activity.is_running else 'after'} {activity.call}"

    def is_node_dead(self, rank: int) -> bool:
        """Return whether the worker's node had several workers and all of them are dead."""
        node_id = self.processes[rank].node_id
        on_node = [r for r, process in enumerate(self.processes) if process.node_id == node_id]
        return len(on_node) > 1 and set(on_node) <= set(self.dead_ranks())

    def free_memory(self, rank: int) -> str:
        """Return free and total memory of the worker's node; empty when unknown."""
        memory = self.statuses[rank].node_memory
        return f"{memory.free / GIB:.1f} of {memory.total / GIB:.1f} GiB" if memory.total else ""

    def dead_ranks(self) -> list[int]:
        return [rank for rank, status in enumerate(self.statuses) if status.is_dead]

    def blocking_ranks(self) -> list[int]:
        """Return the ranks that others wait for: dead, else stopped, else behind in a call."""
        stopped = [rank for rank, status in enumerate(self.statuses) if status.is_stopped]
        return self.dead_ranks() or stopped or self._ranks_behind()

    def who_waits(self) -> str:
        """Describe who waits for whom; empty when that is unknown."""
        blocking = self.blocking_ranks()
        waiting = [
            rank
            for rank, status in enumerate(self.statuses)
            if rank not in blocking and status.activity.is_running
        ]
        if not (blocking and waiting):
            return ""
        verb = "wait" if len(waiting) > 1 else "waits"
        return f"{_names(waiting)} {verb} for {_names(blocking)}"

    def _ranks_behind(self) -> list[int]:
        """Return the ranks with the fewest beats in the commonest call; none if all are equal."""
        running = [status.activity.call for status in self.statuses if status.activity.is_running]
        if not running:
            return []
        call = max(sorted(set(running)), key=running.count)
        beats = [
            status.activity.call_beats
            if status.activity.is_running and status.activity.call == call
            else -1
            for status in self.statuses
        ]
        fewest = min(beats)
        return [] if fewest == max(beats) else [r for r, n in enumerate(beats) if n == fewest]


def death_error(snapshot: ClusterSnapshot, rank: int) -> WorkerDiedError:
    """Return the error for a process that has ended."""
    kills = snapshot.statuses[rank].oom_kills
    if kills:
        reason = f"the kernel killed {kills} of its node's processes for lack of memory"
        return memory_error(snapshot, rank, reason)
    reason = "its process was killed or crashed"
    if snapshot.is_node_dead(rank):
        reason += ", like all workers of its node: they end with Ray's process there (raylet)"
    return WorkerDiedError(f"{snapshot.worker_name(rank)} died {snapshot.moment(rank)}: {reason}")


def call_error(
    snapshot: ClusterSnapshot, rank: int | None, failure: CallFailure
) -> WorkerDiedError:
    """Return the error for a call that failed; `rank` is None when the worker is unknown."""
    if failure.is_out_of_memory:
        return memory_error(snapshot, rank, failure.summary)
    verb = "died" if failure.is_death else "failed"
    where = snapshot.in_call(rank)
    return WorkerDiedError(
        f"{snapshot.worker_name(rank)} {verb} {where}: {failure.message.strip()}"
    )


def memory_error(snapshot: ClusterSnapshot, rank: int | None, reason: str) -> WorkerMemoryError:
    """Return the error for a lack of memory; `reason` is the report of Ray, torch or the kernel."""
    usage = ""
    if rank is not None and snapshot.statuses:
        usage = f" It held up to {snapshot.peak_rss_bytes[rank] / GIB:.2f} GiB"
        free = snapshot.free_memory(rank)
        usage += f"; its node has {free} free now." if free else "."
    return WorkerMemoryError(
        f"{snapshot.worker_name(rank)} ran out of memory {snapshot.in_call(rank)} ({reason})."
        f"{usage} {memory_advice(snapshot.call(rank))}"
    )


def stopped_error(snapshot: ClusterSnapshot, rank: int, *, limit_s: float) -> WorkerStalledError:
    return WorkerStalledError(
        f"{snapshot.worker_name(rank)} was stopped by a signal (SIGSTOP) {snapshot.moment(rank)} "
        f"and did not continue within {limit_s:g} s"
    )


def no_progress_error(
    snapshot: ClusterSnapshot, rank: int | None, *, key: str, limit_s: float
) -> WorkerStalledError:
    """Return the error for a worker without progress for `limit_s`, the value of setting `key`."""
    waits = snapshot.who_waits()
    return WorkerStalledError(
        f"{snapshot.worker_name(rank)} made no progress {snapshot.in_call(rank)} "
        f"for {key} = {limit_s:g} s{f' ({waits})' if waits else ''}. If it only needs more time, "
        "raise this setting"
    )


def _names(ranks: Sequence[int]) -> str:
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
