"""Which ranks share one copy of the weights, and which hold copies of it."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def build_mesh(device_type: str, *, shard_size: int) -> DeviceMesh:
    """All ranks as [shard] when they share one copy, as [replicate, shard] when there are several.

    `shard_size`: how many ranks, one behind the other, share a copy; 0: all. It divides their
    number. With several copies gradients are summed over all ranks, weights gathered within a copy
    (hybrid sharding; Zhao et al. 2023, section 3.2.2).
    """
    num_ranks = dist.get_world_size()
    size = shard_size or num_ranks
    assert num_ranks % size == 0, f"{num_ranks} ranks in copies of {size}"
    if size == num_ranks:
        return init_device_mesh(device_type, (num_ranks,), mesh_dim_names=("shard",))
    shape = (num_ranks // size, size)
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))
