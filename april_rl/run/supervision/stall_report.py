"""The report on failed workers, stall_report.txt: who waits for whom, and what each one does."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from april_rl.run.supervision.diagnosis import GIB, ClusterSnapshot
from april_rl.run.supervision.node_monitor import NO_REPLY, WorkerTrace

_STATES = {
    "": "dead",
    NO_REPLY: "unknown: no answer from its node",
    "D": "waiting for a device",
    "R": "running",
    "S": "sleeping",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
}
_HEADER = ("rank", "pid", "process", "call", "started", "beats", "RSS", "node")
_ROW = "{:>4}  {:>8}  {:<20}  {:<14}  {:>13}  {:>6}  {:>9}  {}"
_LEGEND = "call: in parentheses when it has ended; beats: signs of progress in the call"


def report_text(
    error: Exception, snapshot: ClusterSnapshot, *, traces: Sequence[WorkerTrace]
) -> str:
    """Return the whole report; `traces` are by rank."""
    parts = [
        f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}",
        str(error),
        f"waiting: {snapshot.who_waits() or 'unknown'}",
        _table(snapshot),
        *_memory_lines(snapshot),
    ]
    for rank, trace in enumerate(traces):
        name = snapshot.worker_name(rank)
        parts += [
            f"--- {name}: stacks of all threads, innermost call first\n{trace.stacks}",
            f"--- {name}: end of its log\n{trace.log_tail or 'empty'}",
        ]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _table(snapshot: ClusterSnapshot) -> str:
    if not snapshot.processes:
        return "the state of the workers is unknown: the failure came before they had started"
    rows = [_ROW.format(*_HEADER)]
    for rank, (process, status) in enumerate(
        zip(snapshot.processes, snapshot.statuses, strict=True)
    ):
        activity = status.activity
        rows.append(
            _ROW.format(
                rank,
                process.pid,
                _STATES.get(status.state, status.state),
                activity.call if activity.is_running else f"({activity.call or 'none'})",
                f"{activity.call_s:.1f} s ago",
                activity.call_beats,
                f"{status.rss_bytes / GIB:.2f} GiB",
                f"{process.host} {process.node_id[:8]}",
            )
        )
    return "\n".join([*rows, _LEGEND])


def _memory_lines(snapshot: ClusterSnapshot) -> list[str]:
    rank_of_host = {process.host: rank for rank, process in enumerate(snapshot.processes)}
    lines = []
    for host, rank in rank_of_host.items():
        free, kills = snapshot.free_memory(rank), snapshot.statuses[rank].oom_kills
        known = f"{free} free; processes killed by the kernel for lack of it: {kills}"
        lines.append(f"memory of {host}: {known if free else 'unknown, the node does not answer'}")
    return lines
