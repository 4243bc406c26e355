"""The report of a failed group of workers: who waits for whom, and where each of them stands."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from april_rl.runtime.supervision.diagnosis import GIB, Scene
from april_rl.runtime.supervision.node_monitor import UNSEEN, Findings, Vitals

_STATES = {
    "": "dead",
    UNSEEN: "not seen: its node does not answer",
    "D": "waiting for a device",
    "R": "running",
    "S": "sleeping",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
}
_HEADER = ("rank", "pid", "process", "call", "since", "beats", "steps", "tokens", "RSS", "node")
_ROW = "{:>4}  {:>8}  {:<20}  {:<14}  {:>9}  {:>6}  {:>9}  {:>11}  {:>9}  {}"


def report_text(
    error: Exception, scene: Scene, *, findings: Sequence[Findings], oldest_request: str
) -> str:
    """The whole report. `findings` by rank; `oldest_request`: a line about it, or nothing."""
    parts = [
        f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}",
        str(error),
        f"waiting: {scene.waiting() or 'nobody is known to wait for another'}",
        f"oldest request in flight: {oldest_request or 'none'}",
        _table(scene),
        *_memory(scene),
    ]
    for rank, found in enumerate(findings):
        parts += [
            f"--- {scene.name(rank)}: stacks, the innermost call first\n{found.stacks}",
            f"--- {scene.name(rank)}: end of its log\n{found.log_tail or 'empty'}",
        ]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _table(scene: Scene) -> str:
    if not scene.members:
        return "the workers had not been met yet: nothing is known of them"
    rows = [_ROW.format(*_HEADER)]
    for rank, (member, vitals) in enumerate(zip(scene.members, scene.vitals, strict=True)):
        seen = vitals.activity
        rows.append(
            _ROW.format(
                rank,
                member.pid,
                _STATES.get(vitals.state, vitals.state),
                seen.call if seen.is_running else f"({seen.call or 'none'})",
                f"{seen.call_s:.1f} s",
                seen.call_beats,
                seen.engine_steps,
                seen.generated_tokens,
                _gib(vitals),
                f"{member.host} {member.node_id[:8]}",
            )
        )
    rows.append("a call in brackets has ended; beats: its signs of progress")
    return "\n".join(rows)


def _gib(vitals: Vitals) -> str:
    return f"{vitals.rss_bytes / GIB:.2f} GiB"


def _memory(scene: Scene) -> list[str]:
    """A line a node."""
    rank_of_host = {member.host: rank for rank, member in enumerate(scene.members)}
    lines = []
    for host, rank in rank_of_host.items():
        memory, kills = scene.memory(rank), scene.machines[rank].oom_kills
        known = f"{memory} free; processes killed for want of it since the start: {kills}"
        lines.append(f"memory of {host}: {known if memory else 'not known, nobody answers there'}")
    return lines
