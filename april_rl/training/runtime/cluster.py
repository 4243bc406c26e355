"""Starts Ray on this machine or joins a running cluster, and places the workers on its nodes."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil
import ray
from ray.exceptions import AuthenticationError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from april_rl.errors import RunError
from april_rl.run.supervision.interrupts import block_signals
from april_rl.training.batch.packing import TOKEN_BYTES
from april_rl.training.runtime.process_setup import start_advice

_MIB = 1 << 20
# Batches and completions pass through the object store; weights never do.
_MIN_STORE_BYTES = 256 * _MIB
_BATCHES = 2  # the one being trained, and the references left to the one before
_SHARED_MEMORY = "/dev/shm"  # where Ray keeps its objects
_PLACEMENT_TIMEOUT_S = 120.0
_CONNECT_TIMEOUT_S = 10.0  # time limit for connecting to a running cluster


class JoinError(RunError):
    """The cluster of runtime.ray_address does not answer, or refuses this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the Ray cluster."""

    ip: str
    id: str  # Ray's
    room: int  # workers that fit when nothing else runs on the node


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLocation:
    """Node and process in which Ray started a worker."""

    node_ip: str
    node_id: str  # Ray's id: two nodes may share a machine
    gpu: str  # the id that Ray assigned; empty on CPU


def object_store_bytes(batch_tokens: int, *, available: int) -> int:
    """Return the bytes of Ray's object store for these batches, in `available` shared memory."""
    return max(_MIN_STORE_BYTES, min(_BATCHES * TOKEN_BYTES * batch_tokens, available))


def start_ray(*, num_workers: int, address: str | None, batch_tokens: int = 0) -> None:
    """Join the cluster at `address`, or start Ray embedded here: offline, no dashboard.

    `batch_tokens` is the maximum number of prompt and response tokens that a step trains. Raise
    RunError when Ray does not start, for example within its 30 seconds on a busy machine.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Keep Ray from hiding GPUs from workers that reserve none; by default it warns that it will.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address is not None:
        join(address)
        return
    # With Ray's default, 15, every other process on the machine, such as the rewards, would get the
    # CPU before the engine and the learner.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray would start an idle Python process for each core of the machine. None would ever be used,
    # because the workers have environments of their own.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    try:
        with block_signals():
            ray.init(
                address="local",  # otherwise Ray would join RAY_ADDRESS and refuse the rest
                num_cpus=max(num_workers, os.cpu_count() or 1),
                include_dashboard=False,
                object_store_memory=object_store_bytes(
                    batch_tokens, available=psutil.disk_usage(_SHARED_MEMORY).free
                ),
                log_to_driver=False,
                logging_level=logging.ERROR,
                ignore_reinit_error=True,
            )
    except Exception as error:  # Ray raises only this type when its processes start too slowly
        reason = " ".join(str(error).split())
        raise RunError(
            f"Ray did not start on this machine ({reason}). {start_advice(reason)}"
        ) from error


def join(address: str) -> None:
    """Connect to the cluster at `address`, host:port, or auto for the cluster that this machine
    belongs to. Do nothing when Ray is connected already.

    Raise JoinError within seconds when nothing listens there, or the token is wrong or missing.
    """
    if ray.is_initialized():
        return
    if address != "auto":
        _check_listening(address)
    # By default Ray tries twenty times for up to 40 s, in case the cluster is still starting.
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (RayError, ConnectionError, RuntimeError) as error:
        raise JoinError(f"runtime.ray_address={address}: {_reason(error)}") from error


def _check_listening(address: str) -> None:
    """Raise JoinError when nothing listens at `address`: Ray would need minutes to find out."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise JoinError(
            f"runtime.ray_address={address}: no Ray cluster answers ({error}); give the address "
            "that `ray start --head` printed, and check with `ray status` that the cluster is up"
        ) from error


def _reason(error: BaseException) -> str:
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    # When the token is wrong, Ray keeps only the text of the exception.
    is_token = isinstance(error, AuthenticationError)
    if is_token or any("InvalidAuthToken" in str(link) for link in chain):
        mode = os.environ.get("RAY_AUTH_MODE", "not set")
        return (
            "the cluster requires its token, which is missing or different here; set "
            f"RAY_AUTH_MODE=token (now: {mode}) and copy the token of the node that started the "
            "cluster to ~/.ray/auth_token, or name its file in RAY_AUTH_TOKEN_PATH"
        )
    if any("No node info found" in str(link) for link in chain):
        return (
            "this machine is not part of that Ray cluster; run `ray start --address=...` here first"
        )
    return f"Ray cannot connect to the cluster ({' '.join(str(error).split())})"


def stop_ray() -> None:
    """Disconnect from the cluster, or end the embedded one within 30 s; do nothing without one."""
    descendants = _raylet_descendants()
    # Ray waits a second for each of its processes to obey SIGTERM, which they block. The head
    # process and the raylet must live until this process has disconnected; the others need not.
    node = ray._private.worker._global_node
    if node is not None:
        for kind, process in node.live_processes():
            if kind not in ("gcs_server", "raylet"):
                process.kill()
    ray.shutdown(wait_for_processes=True)
    # When Ray's head process is gone, shutdown kills the raylet but not its agents.
    for raylet, process in descendants:
        if not raylet.is_running():  # it still runs if this process only joined the cluster
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _raylet_descendants() -> list[tuple[psutil.Process, psutil.Process]]:
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.name() == "raylet":
                found += [(child, process) for process in child.children(recursive=True)]
    return found


def cluster_gpus(address: str) -> int:
    """Join the cluster at `address` and return how many GPUs it has."""
    start_ray(num_workers=1, address=address)
    return sum(node.room for node in _nodes({"GPU": 1.0}))


def spread(
    nodes: Iterable[Node], *, num_workers: int, tensor_parallel_size: int
) -> list[tuple[Node, int]]:
    """Return how many workers each node gets, the nodes by address.

    All workers of an engine share a node. Nodes with more room are filled first, so that few are
    used. Raise RunError naming the keys when there is not enough room.
    """
    chosen, left = [], num_workers
    by_room = sorted(nodes, key=lambda node: (-node.room, _address_key(node.ip), node.id))
    for node in by_room:
        count = min(left, node.room - node.room % tensor_parallel_size)
        if count:
            chosen.append((node, count))
            left -= count
    if left:
        rooms = ", ".join(f"{node.room} on {node.ip}" for node in by_room) or "none"
        raise RunError(
            f"runtime.num_workers={num_workers}: {left} of them do not fit; the Ray cluster has "
            f"room for {rooms}, and all workers of an engine "
            f"(engine.tensor_parallel_size={tensor_parallel_size}) must share a node"
        )
    return sorted(chosen, key=lambda pair: (_address_key(pair[0].ip), pair[0].id))


class Placement:
    """The placement groups that reserve the workers' resources, one on each node."""

    def __init__(self, *, num_workers: int, tensor_parallel_size: int, use_gpu: bool) -> None:
        """Reserve one CPU, and with `use_gpu` one GPU, per worker.

        Raise RunError naming runtime.num_workers when there is no room, or when other users of the
        cluster hold it for too long.
        """
        bundle = {"CPU": 1.0, "GPU": 1.0} if use_gpu else {"CPU": 1.0}
        counts = spread(
            _nodes(bundle), num_workers=num_workers, tensor_parallel_size=tensor_parallel_size
        )
        self._groups = [(_reserve(bundle, node, count), count) for node, count in counts]
        if not all(group.wait(_PLACEMENT_TIMEOUT_S) for group, _ in self._groups):
            free = ray.available_resources()  # type: ignore[no-untyped-call]
            self.remove()
            raise RunError(
                f"runtime.num_workers={num_workers} needs {num_workers} times {bundle}; the Ray "
                f"cluster has { {k: free.get(k, 0.0) for k in bundle} } free: lower it, or wait "
                "until other runs on the cluster end"
            )

    def strategies(self) -> list[PlacementGroupSchedulingStrategy]:
        return [
            PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            for group, count in self._groups
            for index in range(count)
        ]

    def remove(self) -> None:
        """Release the resources."""
        for group, _ in self._groups:
            remove_placement_group(group)


def rank_order(locations: Sequence[WorkerLocation]) -> list[int]:
    """Return the indices of `locations` by rank: sorted by node and by GPU within a node; on CPU
    in the given order. Workers of one engine or one shard group have consecutive ranks, so they
    are neighbours on the machine.
    """

    def key(index: int) -> tuple[object, ...]:
        where = locations[index]
        gpu = int(where.gpu) if where.gpu.isdigit() else 0  # other ids are sorted as text
        return (_address_key(where.node_ip), where.node_id, gpu, where.gpu, index)

    return sorted(range(len(locations)), key=key)


def _address_key(ip: str) -> tuple[int, int]:
    address = ipaddress.ip_address(ip)
    return address.version, int(address)


def _nodes(bundle: dict[str, float]) -> list[Node]:
    """Return the nodes that are alive; their room is how often `bundle` fits."""
    found = []
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        resources = node["Resources"]
        room = min(int(resources.get(kind, 0.0) // amount) for kind, amount in bundle.items())
        if node["Alive"]:
            found.append(Node(ip=node["NodeManagerAddress"], id=node["NodeID"], room=room))
    return found


def _reserve(bundle: dict[str, float], node: Node, count: int) -> PlacementGroup:
    group: PlacementGroup = placement_group(
        [bundle] * count,
        strategy="STRICT_PACK",
        bundle_label_selector=[{"ray.io/node-id": node.id}] * count,
    )
    return group
