"""Ray: embedded on this machine or a running cluster, and where on it the workers are placed."""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from april_rl.errors import RunError
from april_rl.runtime.join_cluster import join

_MIB = 1 << 20
# Batches and completions pass through the object store; weights never do.
_LEAST_STORE_BYTES = 256 * _MIB
_TOKEN_BYTES = 42  # of a token in a micro-batch: its ids, mask, ages, log-probability, weights
_BATCHES = 2  # the one that is trained, and what is still referred to of the one before
_SHARED_MEMORY = "/dev/shm"  # where Ray keeps its objects
_PLACEMENT_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of the cluster."""

    ip: str
    id: str  # Ray's
    room: int  # workers that fit on it when nothing else runs there


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a worker found itself."""

    node_ip: str
    node_id: str  # Ray's: two nodes may share a machine
    gpu: str  # the id Ray gave it; empty on CPU


def object_store_bytes(batch_tokens: int, *, available: int) -> int:
    """Return how large the object store is to be for batches of up to `batch_tokens` tokens, so
    that none is written to disk; `available` is the shared memory of this machine in bytes.
    """
    return max(_LEAST_STORE_BYTES, min(_BATCHES * _TOKEN_BYTES * batch_tokens, available))


def start_ray(*, num_workers: int, address: str | None, batch_tokens: int = 0) -> None:
    """Join the cluster at `address`, or start Ray embedded here: offline, no dashboard.

    `batch_tokens`: the most tokens, of prompts and responses, that a step trains.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Workers without a GPU keep the environment's own choice of visible devices: Ray would
    # otherwise announce, with a warning, that it is going to hide all of them.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address is not None:
        join(address)
        return
    # Ray's own default, 15, would have every other process of the machine go before the engine
    # and the learner: the rewards, and whatever else runs there.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(
        address="local",  # otherwise Ray would follow RAY_ADDRESS, and refuse the rest
        num_cpus=max(num_workers, os.cpu_count() or 1),
        include_dashboard=False,
        object_store_memory=object_store_bytes(
            batch_tokens, available=psutil.disk_usage(_SHARED_MEMORY).free
        ),
        log_to_driver=False,
        logging_level=logging.ERROR,
        ignore_reinit_error=True,
    )


def stop_ray() -> None:
    """Leave the cluster, or end the embedded one; nothing when there is none."""
    below = _below_raylets()
    ray.shutdown()
    # Without its head a raylet is killed, not asked, and its agents would outlive the run.
    for raylet, process in below:
        if not raylet.is_running():  # that of a cluster that was only joined goes on
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _below_raylets() -> list[tuple[psutil.Process, psutil.Process]]:
    """Every process of a raylet that this process has started, behind that raylet."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.name() == "raylet":
                found += [(child, process) for process in child.children(recursive=True)]
    return found


def cluster_gpus(address: str) -> int:
    """GPUs of the cluster at `address`, which is joined."""
    start_ray(num_workers=1, address=address)
    return sum(node.room for node in _nodes({"GPU": 1.0}))


def spread(
    nodes: Iterable[Node], *, num_workers: int, tensor_parallel_size: int
) -> list[tuple[Node, int]]:
    """How many workers each node gets, the nodes in the order of their address.

    Engines are not divided over nodes, and nodes with more room come first, so that there are few.
    Raises RunError naming the keys when there is not enough room.
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
            f"runtime.num_workers={num_workers}: there is no room for {left} of them; the Ray "
            f"cluster has room for {rooms}, and the workers of an engine "
            f"(engine.tensor_parallel_size={tensor_parallel_size}) share a node"
        )
    return sorted(chosen, key=lambda pair: (_address_key(pair[0].ip), pair[0].id))


class Placement:
    """Owner of the placement groups that hold the workers' resources, one on each node."""

    def __init__(self, *, num_workers: int, tensor_parallel_size: int, use_gpu: bool) -> None:
        """Reserve a bundle a worker. Raises RunError naming runtime.num_workers when there is no
        room, or when other users of the cluster keep it for too long.
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
                f"runtime.num_workers={num_workers} wants {num_workers} times {bundle}, of which "
                f"the Ray cluster has { {k: free.get(k, 0.0) for k in bundle} } free: ask for "
                "fewer, or wait for the other runs on it"
            )

    def strategies(self) -> list[PlacementGroupSchedulingStrategy]:
        """One for each worker, node by node."""
        return [
            PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            for group, count in self._groups
            for index in range(count)
        ]

    def remove(self) -> None:
        """Give the resources back."""
        for group, _ in self._groups:
            remove_placement_group(group)


def rank_order(places: Sequence[Place]) -> list[int]:
    """Indices of `places` in the order of ranks: by node, and on it by GPU; on CPU as they come.

    So neighbours in rank are neighbours on the machine: an engine's, and a shard's.
    """

    def key(index: int) -> tuple[object, ...]:
        place = places[index]
        gpu = int(place.gpu) if place.gpu.isdigit() else 0  # others are names: by the name
        return (_address_key(place.node_ip), place.node_id, gpu, place.gpu, index)

    return sorted(range(len(places)), key=key)


def _address_key(ip: str) -> tuple[int, int]:
    """Addresses in the order of their numbers: 10.0.0.9 before 10.0.0.10."""
    address = ipaddress.ip_address(ip)
    return address.version, int(address)


def _nodes(bundle: dict[str, float]) -> list[Node]:
    """The living nodes with the number of times `bundle` fits on each."""
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
