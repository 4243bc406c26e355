"""What is known of the workers when one of them has failed, and the error that says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from april_rl.runtime.supervision.failures import (
    Failure,
    HeadLostError,
    WorkerDiedError,
    WorkerMemoryError,
    WorkerStalledError,
    memory_advice,
)
from april_rl.runtime.supervision.heartbeat import Member
from april_rl.runtime.supervision.node_monitor import UNSEEN, Machine, Vitals

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Every worker, by rank; all of it empty when they have not been met."""

    members: Sequence[Member]
    vitals: Sequence[Vitals]
    machines: Sequence[Machine]  # of each worker's node
    most_rss_bytes: Sequence[int]  # each was seen with

    def name(self, rank: int | None) -> str:
        """Which worker, and where."""
        if rank is None:
            return "a worker"
        if not self.members:
            return f"worker {rank}"
        member = self.members[rank]
        return f"worker {rank} (pid {member.pid} on {member.host})"

    def call(self, rank: int | None) -> str:
        """The method it runs, or ran last."""
        return "" if rank is None or not self.vitals else self.vitals[rank].activity.call

    def is_node_dead(self, rank: int) -> bool:
        """Whether its node had several workers and all of them are dead."""
        node_id = self.members[rank].node_id
        beside = [r for r, member in enumerate(self.members) if member.node_id == node_id]
        return len(beside) > 1 and set(beside) <= set(self.dead())

    def memory(self, rank: int) -> str:
        """That of its machine, in words; empty when it is not known."""
        machine = self.machines[rank]
        if not machine.total_bytes:
            return ""
        return f"{machine.free_bytes / GIB:.1f} of {machine.total_bytes / GIB:.1f} GiB"

    def dead(self) -> list[int]:
        """The ranks without a process."""
        return [rank for rank, vitals in enumerate(self.vitals) if vitals.is_dead]

    def at_fault(self) -> list[int]:
        """The ranks that the others wait for: dead ones, else stopped ones, else those of a node
        that does not answer, else those that have come least far in a call which others run too.
        """
        stopped = [rank for rank, vitals in enumerate(self.vitals) if vitals.is_stopped]
        unseen = [rank for rank, vitals in enumerate(self.vitals) if vitals.state == UNSEEN]
        return self.dead() or stopped or unseen or self._behind()

    def waiting(self) -> str:
        """Who waits for whom, as a sentence; empty when nobody knows."""
        blamed = self.at_fault()
        others = [
            rank
            for rank, vitals in enumerate(self.vitals)
            if rank not in blamed and vitals.activity.is_running
        ]
        return f"{_ranks(others)} for {_ranks(blamed)}" if blamed and others else ""

    def _behind(self) -> list[int]:
        """The ranks behind the others in the call that most of them run; none when all are even."""
        running = [vitals.activity.call for vitals in self.vitals if vitals.activity.is_running]
        if not running:
            return []
        call = max(sorted(set(running)), key=running.count)
        progress = [
            vitals.activity.call_beats
            if vitals.activity.is_running and vitals.activity.call == call
            else -1
            for vitals in self.vitals
        ]
        least = min(progress)
        return [] if least == max(progress) else [r for r, n in enumerate(progress) if n == least]


def died(scene: Scene, rank: int) -> WorkerDiedError:
    """A process has ended."""
    kills = scene.machines[rank].oom_kills
    if kills:
        said = f"processes killed there for want of memory since the start: {kills}"
        return out_of_memory(scene, rank, said)
    why = "its process was killed or crashed"
    if scene.is_node_dead(rank):
        why += " like all workers of its node: they end with Ray's own process there (raylet)"
    return WorkerDiedError(f"{scene.name(rank)} died in {scene.call(rank) or 'no call'}: {why}")


def failed(scene: Scene, rank: int | None, failure: Failure) -> WorkerDiedError:
    """A call to `rank` (None: it is not known) brought no result."""
    if failure.is_memory:
        return out_of_memory(scene, rank, failure.summary)
    verb = "died" if failure.is_death else "failed"
    call = scene.call(rank) or ("" if scene.members else "its start")
    in_call = f" in {call}" if call else ""
    return WorkerDiedError(f"{scene.name(rank)} {verb}{in_call}: {failure.message.strip()}")


def out_of_memory(scene: Scene, rank: int | None, said: str) -> WorkerMemoryError:
    """`said`: what Ray, torch, the kernel or Python say of it."""
    held = ""
    if rank is not None and scene.machines:
        held = f" It held {scene.most_rss_bytes[rank] / GIB:.2f} GiB"
        memory = scene.memory(rank)
        held += f"; {memory} of its machine are free now." if memory else "."
    call = scene.call(rank)
    return WorkerMemoryError(
        f"{scene.name(rank)} ran out of memory in {call or 'its start'} ({said}).{held} "
        f"{memory_advice(call)}"
    )


def head_lost(scene: Scene, address: str) -> HeadLostError:
    """Nobody listens at the `address` of Ray's head process any more."""
    kills = max((machine.oom_kills for machine in scene.machines), default=0)
    memory = f" (processes killed for want of memory beside the workers: {kills})" if kills else ""
    return HeadLostError(
        f"Ray's head process (gcs_server at {address}) has ended: it was killed{memory}, crashed, "
        "or was stopped with its cluster (`ray stop`). A Ray cluster does not outlive it, so the "
        "run ends. gcs_server.out in the logs of Ray's session on its machine "
        "(/tmp/ray/session_latest/logs) may say why. Start the run again; where "
        "runtime.ray_address names a cluster, that first: `ray stop`, then `ray start`, on every "
        "machine"
    )


def stopped(scene: Scene, rank: int) -> WorkerStalledError:
    """A signal has stopped the process."""
    return WorkerStalledError(
        f"{scene.name(rank)} is stopped (SIGSTOP or the like) in {scene.call(rank) or 'no call'}"
    )


def silent(scene: Scene, rank: int | None, *, key: str, limit_s: float) -> WorkerStalledError:
    """It has shown no progress for `limit_s`, the value of the setting `key`."""
    waiting = scene.waiting()
    return WorkerStalledError(
        f"{scene.name(rank)} has shown no progress for {key} = {limit_s:g} s in "
        f"{scene.call(rank) or 'its start'}{f' ({waiting})' if waiting else ''}"
    )


def _ranks(ranks: Sequence[int]) -> str:
    """In words."""
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
