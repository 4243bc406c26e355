"""What the watchdog may see of workers, made up."""

from __future__ import annotations

from april_rl.runtime.supervision.diagnosis import GIB, Scene
from april_rl.runtime.supervision.heartbeat import Activity, Member
from april_rl.runtime.supervision.node_monitor import Machine, Vitals

UNMET = Scene(members=(), vitals=(), machines=(), most_rss_bytes=())


def member(pid: int = 100, *, born: str = "1", counter: str = "", kills: int = 0) -> Member:
    return Member(
        node_id="a" * 56,
        host="node-a",
        pid=pid,
        born=born,
        pulse_fd=-1,
        stacks_fd=-1,
        oom_counter=counter,
        oom_kills=kills,
    )


def vitals(state="S", *, call="update", call_beats=3, is_running=True, beats=10) -> Vitals:
    activity = Activity(
        beats=beats, call=call, is_running=is_running, call_beats=call_beats, call_s=12.5
    )
    return Vitals(state=state, rss_bytes=3 * GIB, activity=activity)


def scene(*of_ranks: Vitals, oom_kills: int = 0, total_bytes: int = 64 * GIB) -> Scene:
    ranks = range(len(of_ranks))
    machine = Machine(total_bytes=total_bytes, free_bytes=GIB, oom_kills=oom_kills)
    return Scene(
        members=[member(100 + rank) for rank in ranks],
        vitals=of_ranks,
        machines=[machine for _ in ranks],
        most_rss_bytes=[5 * GIB for _ in ranks],
    )
