"""Workers on two nodes: two raylets of one Ray cluster on this machine."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from april_rl.errors import RunError
from april_rl.training.runtime.cluster import Placement, cluster_gpus, rank_order, stop_ray
from april_rl.training.runtime.worker import WorkerActor

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine]
CPUS = 3  # CPUs of each node: room for three workers, or for one engine of two


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    options = {"num_cpus": CPUS, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=options)
    cluster.add_node(num_cpus=CPUS, object_store_memory=80 << 20)
    yield cluster.address
    stop_ray()
    cluster.shutdown()


def start_workers(placement: Placement) -> list[Any]:
    settings = SimpleNamespace(device="cpu", threads=1)
    remote = ray.remote(WorkerActor)
    return [
        remote.options(num_cpus=1, scheduling_strategy=strategy).remote(settings)
        for strategy in placement.strategies()
    ]


def test_an_engine_stays_on_one_node_and_all_workers_form_one_group(address: str) -> None:
    """Four workers in engines of two, with room for three workers on each node; actors are
    shuffled.

    Fails when an engine spans two nodes, when ranks follow the order of creation, or when the ranks
    meet at an address or port that is not rank 0's.
    """
    assert cluster_gpus(address) == 0
    placement = Placement(num_workers=4, tensor_parallel_size=2, use_gpu=False)
    started = start_workers(placement)
    actors = [started[index] for index in (2, 0, 3, 1)]
    locations = ray.get([actor.location.remote() for actor in actors])
    order = rank_order(locations)
    nodes = [locations[index].node_id for index in order]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    ranks = [actors[index] for index in order]
    meeting = ray.get(ranks[0].listen.remote(4))
    assert meeting[0] == locations[order[0]].node_ip
    joined = [
        actor.join.remote(meeting, rank=rank, world_size=4, timeout_s=120)
        for rank, actor in enumerate(ranks)
    ]
    assert ray.get(joined, timeout=120) == [None] * 4
    for actor in actors:
        ray.kill(actor)
    placement.remove()


def test_workers_that_do_not_fit_are_refused_before_anything_is_reserved(address: str) -> None:
    """There are six CPUs, but only room for two engines of two."""
    assert cluster_gpus(address) == 0
    with pytest.raises(RunError, match=r"runtime\.num_workers=6: 2 of them do not fit"):
        Placement(num_workers=6, tensor_parallel_size=2, use_gpu=False)
    with pytest.raises(RunError, match=r"1 of them do not fit; .*room for 0 on"):
        Placement(num_workers=1, tensor_parallel_size=1, use_gpu=True)
