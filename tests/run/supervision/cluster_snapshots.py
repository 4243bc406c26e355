"""Invented workers, statuses and snapshots, in the form that supervision gets."""

from april_rl.run.supervision.diagnosis import GIB, ClusterSnapshot
from april_rl.run.supervision.heartbeat import Activity, WorkerProcess
from april_rl.run.supervision.host_memory import HostMemory
from april_rl.run.supervision.node_monitor import ProcessStatus

BEFORE_START = ClusterSnapshot(processes=(), statuses=(), peak_rss_bytes=())


def process_of(
    pid: int = 100, *, start_ticks: str = "1", counter: str = "", kills: int = 0
) -> WorkerProcess:
    return WorkerProcess(
        node_id="a" * 56,
        host="node-a",
        pid=pid,
        start_ticks=start_ticks,
        heartbeat_fd=-1,
        stacks_fd=-1,
        oom_counter=counter,
        oom_kills=kills,
    )


def status(
    state="S",
    *,
    call="update",
    call_beats=3,
    is_running=True,
    beats=10,
    oom_kills=0,
    node_bytes=64 * GIB,
) -> ProcessStatus:
    activity = Activity(
        beats=beats, call=call, is_running=is_running, call_beats=call_beats, call_s=12.5
    )
    return ProcessStatus(
        state=state,
        rss_bytes=3 * GIB,
        activity=activity,
        node_memory=HostMemory(total=node_bytes, free=GIB),
        oom_kills=oom_kills,
    )


def snapshot(*by_rank: ProcessStatus) -> ClusterSnapshot:
    ranks = range(len(by_rank))
    return ClusterSnapshot(
        processes=[process_of(100 + rank) for rank in ranks],
        statuses=by_rank,
        peak_rss_bytes=[5 * GIB for _ in ranks],
    )
