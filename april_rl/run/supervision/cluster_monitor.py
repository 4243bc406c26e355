"""Watches every worker: here directly, on each other node by a monitor that is a Ray actor."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from april_rl.run.supervision.heartbeat import Activity, WorkerProcess
from april_rl.run.supervision.host_memory import HostMemory
from april_rl.run.supervision.node_monitor import (
    NO_REPLY,
    NodeMonitor,
    ProcessStatus,
    WorkerTrace,
)

T = TypeVar("T")
_NODE_REPLIES_S = 5.0
_UNKNOWN_MEMORY = HostMemory(total=0, free=0)
_UNKNOWN_STATUS = ProcessStatus(
    state=NO_REPLY, rss_bytes=0, activity=Activity(), node_memory=_UNKNOWN_MEMORY, oom_kills=0
)
_UNKNOWN_TRACE = WorkerTrace(stacks="no stacks: the node does not answer\n", log_tail="")


class ClusterMonitor:
    """The node monitors of all nodes; every result is by rank."""

    def __init__(self, processes: Sequence[WorkerProcess]) -> None:
        self.processes = tuple(processes)
        this_node = ray.get_runtime_context().get_node_id() if processes else ""
        ranks: dict[str, list[int]] = {}
        for rank, process in enumerate(processes):
            ranks.setdefault(process.node_id, []).append(rank)
        self._local_ranks = ranks.pop(this_node, [])
        self._local = NodeMonitor([processes[rank] for rank in self._local_ranks])
        self._remote = [
            _RemoteNode(node_id, {rank: processes[rank] for rank in on_node})
            for node_id, on_node in ranks.items()
        ]

    def statuses(self) -> list[ProcessStatus]:
        """Return the latest status of every worker at once; NO_REPLY if its node is overdue."""
        return self._by_rank(self._local.statuses(), [node.statuses() for node in self._remote])

    def collect_traces(self, wait_s: float) -> list[WorkerTrace]:
        """Return stacks and log tail of every worker; a node may take `wait_s` and some seconds."""
        calls = [node.call("collect_traces", wait_s) for node in self._remote]
        local = self._local.collect_traces(wait_s)
        remote = [
            reply or [_UNKNOWN_TRACE] * len(node.ranks)
            for node, reply in zip(self._remote, _replies(calls, wait_s), strict=True)
        ]
        return self._by_rank(local, remote)

    def find_processes(self) -> None:
        """Note the processes that `kill_processes` kills; call it before Ray ends the workers."""
        calls = [node.call("find_processes") for node in self._reachable()]
        self._local.find_processes()
        _replies(calls)

    def kill_processes(self) -> None:
        """Kill every noted worker that is still there, and its children."""
        calls = [node.call("kill_processes") for node in self._reachable()]
        self._local.kill_processes()
        _replies(calls)
        for node in self._reachable():
            node.end()

    def _by_rank(self, local: Sequence[T], remote: Iterable[Sequence[T]]) -> list[T]:
        found = dict(zip(self._local_ranks, local, strict=True))
        for node, results in zip(self._remote, remote, strict=True):
            found |= zip(node.ranks, results, strict=True)
        return [found[rank] for rank in range(len(found))]

    def _reachable(self) -> list[_RemoteNode]:
        """Return the other nodes; none after Ray has shut down, since a call would restart it."""
        return self._remote if ray.is_initialized() else []


class _RemoteNode:
    """The monitor of another node, which may reply late or never."""

    def __init__(self, node_id: str, processes: dict[int, WorkerProcess]) -> None:
        self.ranks = list(processes)
        # Ray restarts it when it dies: without it, its workers would seem to make no progress.
        actor = ray.remote(NodeMonitor).options(
            num_cpus=0,
            max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        self._actor: Any = actor.remote(list(processes.values()))
        self._latest = [_UNKNOWN_STATUS] * len(processes)
        self._replied_at = time.monotonic()
        self._request = self.call("statuses")

    def statuses(self) -> list[ProcessStatus]:
        """Return the statuses that the node reported last, and ask for new ones."""
        if ray.wait([self._request], timeout=0)[0]:
            statuses: list[ProcessStatus] | None = _reply(self._request)
            if statuses:
                self._latest, self._replied_at = statuses, time.monotonic()
            self._request = self.call("statuses")
        if time.monotonic() - self._replied_at <= _NODE_REPLIES_S:
            return self._latest
        return [
            replace(status, state=NO_REPLY, node_memory=_UNKNOWN_MEMORY) for status in self._latest
        ]

    def call(self, method: str, *args: object) -> ray.ObjectRef[Any]:
        reference: ray.ObjectRef[Any] = getattr(self._actor, method).remote(*args)
        return reference

    def end(self) -> None:
        ray.kill(self._actor, no_restart=True)


def _replies(calls: Sequence[ray.ObjectRef[Any]], wait_s: float = 0.0) -> list[Any]:
    """Return the result of each call within one time limit; None for a node without a reply."""
    if calls:
        ray.wait(list(calls), num_returns=len(calls), timeout=wait_s + _NODE_REPLIES_S)
    return [_reply(call) for call in calls]


def _reply(call: ray.ObjectRef[Any]) -> Any:  # noqa: ANN401
    try:
        return ray.get(call, timeout=0)
    except RayError:
        return None
