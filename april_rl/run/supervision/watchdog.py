"""The only place where the controller waits for workers. It does not wait for one that is dead,
stopped or hung.

The first failure of any worker ends the run: sooner or later all others wait for that worker, most
of them in a collective.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import ray
from ray.exceptions import RayError

from april_rl.errors import RunError
from april_rl.run.supervision.cluster_monitor import ClusterMonitor
from april_rl.run.supervision.diagnosis import (
    ClusterSnapshot,
    call_error,
    death_error,
    no_progress_error,
    stopped_error,
)
from april_rl.run.supervision.failures import CallFailure, WorkerStalledError, read_failure
from april_rl.run.supervision.node_monitor import ProcessStatus
from april_rl.run.supervision.stall_report import report_text

T = TypeVar("T")
_CHECK_S = 1.0  # pause between two checks of all workers
_STOPPED_S = 4.0  # a process that a signal has stopped for this long counts as hung
_SETTLE_S = 1.0  # time after a failed call in which the death that caused it becomes visible
_STACKS_S = 2.0
# If the controller was suspended for an hour, its workers were not watched for an hour.
_MAX_ELAPSED_S = 3.0


class _Limit(NamedTuple):
    """Longest time that a worker may make no progress, and its setting."""

    key: str
    timeout_s: float


_NO_LIMIT = _Limit("", math.inf)


@dataclass(slots=True)
class WorkerProgress:
    """The progress of one worker."""

    beats: int = -1  # at the last update
    no_progress_s: float = 0.0  # since its last beat, as long as it was waited for
    is_stopped: bool = False  # at the last update
    stopped_s: float = 0.0  # since its process was first found stopped; 0 when it is not
    peak_rss_bytes: int = 0  # the largest resident memory that was found


class ProgressTimer:
    """Adds up time between the controller's own checks, so that clocks are never compared."""

    def __init__(self, num_workers: int) -> None:
        self.workers = [WorkerProgress() for _ in range(num_workers)]

    def update(
        self,
        statuses: Sequence[ProcessStatus],
        *,
        elapsed_s: float,
        waited_for: Collection[int | None],
    ) -> None:
        """Take in each worker's status; time without progress counts for `waited_for` alone."""
        elapsed_s = min(elapsed_s, _MAX_ELAPSED_S)
        for rank, (worker, status) in enumerate(zip(self.workers, statuses, strict=True)):
            beats = status.activity.beats
            is_idle = beats == worker.beats and rank in waited_for
            worker.no_progress_s = worker.no_progress_s + elapsed_s if is_idle else 0.0
            still_stopped = worker.is_stopped and status.is_stopped
            worker.stopped_s = worker.stopped_s + elapsed_s if still_stopped else 0.0
            worker.beats, worker.is_stopped = beats, status.is_stopped
            worker.peak_rss_bytes = max(worker.peak_rss_bytes, status.rss_bytes)


class Watchdog:
    """Waits for calls to workers; returns results, or raises an error that names the culprit."""

    def __init__(self, *, report: Path, stall_timeout_s: float, call_timeout_s: float) -> None:
        """`report` is written when workers fail. A worker is hung when it makes no progress for
        `stall_timeout_s`, or `call_timeout_s` in a call that reports none while it runs.
        """
        self._report = report
        self._stall_limit = _Limit("runtime.stall_timeout_s", stall_timeout_s)
        self._call_limit = _Limit("6 · runtime.stall_timeout_s", call_timeout_s)
        self._actors: list[Any] = []
        self._ranks: dict[object, int] = {}  # rank by Ray's actor id
        self._checked_at = time.monotonic()
        self._monitor, self._progress = ClusterMonitor([]), ProgressTimer(0)
        self.has_failed = False  # a failure has been reported

    @property
    def call_timeout_s(self) -> float:
        """The longest time that a worker may make no progress in any call."""
        return self._call_limit.timeout_s

    def watch(self, actors: Sequence[Any]) -> None:
        """Watch the workers, given by rank. Before this a dead worker is noticed only through a
        call to it, and `call_timeout_s` limits each call as a whole.
        """
        self._actors = list(actors)
        self._ranks = {actor._actor_id: rank for rank, actor in enumerate(actors)}
        processes = self.results([actor.process.remote() for actor in actors])
        self._monitor, self._progress = ClusterMonitor(processes), ProgressTimer(len(processes))

    def results(self, calls: Sequence[ray.ObjectRef[T]], *, reports_beats: bool = False) -> list[T]:
        """Return the results in order; `reports_beats` says that workers beat during these calls.

        Raise a worker's RunError as it is; for every other failure raise WorkerDiedError,
        WorkerMemoryError or WorkerStalledError, which name the worker and the report.
        """
        found: dict[ray.ObjectRef[T], T] = {}
        while len(found) < len(calls):
            left = [call for call in calls if call not in found]
            found |= self.wait(left, reports_beats=reports_beats)
        return [found[call] for call in calls]

    def wait(
        self, calls: Sequence[ray.ObjectRef[T]], *, reports_beats: bool = False
    ) -> dict[ray.ObjectRef[T], T]:
        """Return the results of calls that have ended, at least one; raise as `results` does."""
        limit, started = self._stall_limit if reports_beats else self._call_limit, time.monotonic()
        while True:
            found, failures = self._collect_ended(calls, _CHECK_S)
            if failures:
                self._raise_failure(calls, failures)
            self._check_workers(calls, limit)
            if found:
                return found
            if not self._monitor.processes and time.monotonic() - started >= limit.timeout_s:
                self._raise_no_progress(limit)

    def results_within(
        self, calls: Sequence[ray.ObjectRef[Any]], timeout_s: float
    ) -> list[Any] | None:
        """Return the results in order; None when one is missing after `timeout_s`.

        Raise as `results` does, except for a lack of progress. After a failure has been reported
        nothing is raised: None then also stands for a call that failed.
        """
        deadline = time.monotonic() + timeout_s
        found: dict[ray.ObjectRef[Any], Any] = {}
        while len(found) < len(calls):
            left = [call for call in calls if call not in found]
            left_s = max(0.0, deadline - time.monotonic())
            ended, failures = self._collect_ended(left, min(left_s, _CHECK_S))
            found |= ended
            if failures and not self.has_failed:
                self._raise_failure(left, failures)
            if failures or not (ended or left_s):
                return None
            if not self.has_failed:
                self._check_workers(left, _NO_LIMIT)
        return [found[call] for call in calls]

    def raise_stalled(self, message: str) -> NoReturn:
        """Write the report and raise WorkerStalledError for a stall that the caller has found."""
        self._raise(WorkerStalledError(message), self._snapshot())

    def write_report(self, message: str) -> None:
        """Write the report for a failure that the caller has found, without raising."""
        self._write_report(WorkerStalledError(message), self._snapshot())

    def kill_workers(self) -> None:
        """End the process of every worker and its children, even in the middle of a call."""
        self._monitor.find_processes()
        try:
            # A call would start Ray again.
            for actor in self._actors if ray.is_initialized() else ():
                ray.kill(actor, no_restart=True)
        finally:  # this runs also when Ray raises or the user interrupts
            self._monitor.kill_processes()

    def _collect_ended(
        self, calls: Sequence[ray.ObjectRef[T]], timeout_s: float
    ) -> tuple[dict[ray.ObjectRef[T], T], dict[int | None, CallFailure]]:
        """Return results and failures by rank of ended calls; wait `timeout_s` for the first."""
        ended, waiting = ray.wait(list(calls), num_returns=1, timeout=timeout_s)
        if ended and waiting:
            ended += ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]
        found: dict[ray.ObjectRef[T], T] = {}
        failures: dict[int | None, CallFailure] = {}
        for call in ended:
            try:
                found[call] = ray.get(call)
            except RayError as error:
                failures[self._rank(call)] = read_failure(error)
        return found, failures

    def _rank(self, call: ray.ObjectRef[Any]) -> int | None:
        """Return the rank of the called worker; None before workers are watched."""
        return self._ranks.get(call.task_id().actor_id())

    def _check_workers(self, calls: Sequence[ray.ObjectRef[Any]], limit: _Limit) -> None:
        """Once a second, raise when a worker is dead or stopped, or makes no progress in a call."""
        elapsed_s = time.monotonic() - self._checked_at
        if elapsed_s < _CHECK_S:
            return
        self._checked_at += elapsed_s
        statuses = self._monitor.statuses()
        waited_for = {self._rank(call) for call in calls}
        self._progress.update(statuses, elapsed_s=elapsed_s, waited_for=waited_for)
        for rank, status in enumerate(statuses):
            if status.is_dead:
                self._raise_failure(calls, {})
            if self._progress.workers[rank].stopped_s >= _STOPPED_S:
                snapshot = self._snapshot()
                self._raise(stopped_error(snapshot, rank, limit_s=_STOPPED_S), snapshot)
        if self._ranks_without_progress(limit):
            self._raise_no_progress(limit)

    def _ranks_without_progress(self, limit: _Limit) -> list[int]:
        workers = enumerate(self._progress.workers)
        return [rank for rank, worker in workers if worker.no_progress_s >= limit.timeout_s]

    def _raise_no_progress(self, limit: _Limit) -> NoReturn:
        """Blame the worker that the others wait for, among all without progress."""
        snapshot = self._snapshot()
        ranks = self._ranks_without_progress(limit)
        blocking = set(ranks) & set(snapshot.blocking_ranks())
        rank = min(blocking or ranks, default=None)
        error = no_progress_error(snapshot, rank, key=limit.key, limit_s=limit.timeout_s)
        self._raise(error, snapshot)

    def _raise_failure(
        self, calls: Sequence[ray.ObjectRef[Any]], failures: dict[int | None, CallFailure]
    ) -> NoReturn:
        """Blame a dead worker before one whose call failed only because the other died."""
        deadline = time.monotonic() + _SETTLE_S
        snapshot = self._snapshot()
        while not failures.keys() & set(snapshot.dead_ranks()):
            if time.monotonic() > deadline:
                break
            time.sleep(_SETTLE_S / 10)
            failures = failures | self._collect_ended(calls, 0)[1]
            snapshot = self._snapshot()
        rank = next(iter([*snapshot.dead_ranks(), *failures]))
        failure = failures.get(rank)
        is_dead = rank in snapshot.dead_ranks()
        if failure is None or (is_dead and not failure.is_out_of_memory):
            assert rank is not None
            self._raise(death_error(snapshot, rank), snapshot)
        self._raise(call_error(snapshot, rank, failure), snapshot)

    def _snapshot(self) -> ClusterSnapshot:
        return ClusterSnapshot(
            processes=self._monitor.processes,
            statuses=self._monitor.statuses(),
            peak_rss_bytes=[worker.peak_rss_bytes for worker in self._progress.workers],
        )

    def _raise(self, error: RunError, snapshot: ClusterSnapshot) -> NoReturn:
        """Write the report, and raise `error` with a line that says where the report is."""
        raise type(error)(f"{error}\n{self._write_report(error, snapshot)}") from None

    def _write_report(self, error: RunError, snapshot: ClusterSnapshot) -> str:
        """Return a line that says where the report is, or the report if the disk is full."""
        self.has_failed = True
        text = report_text(error, snapshot, traces=self._monitor.collect_traces(_STACKS_S))
        try:
            self._report.parent.mkdir(parents=True, exist_ok=True)
            self._report.write_text(text, encoding="utf-8")
        except OSError as reason:
            return f"The report could not be written ({reason}):\n{text}"
        return f"Stacks and state of every worker: {self._report}"
