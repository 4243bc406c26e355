"""Layout of the ranks: which ones share a copy of the weights, and which ones hold other copies;
and the settings that all models of a rank share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from april_rl.config.choices import ComputeDtype
from april_rl.config.schema import LearnerConfig

_DTYPES = {ComputeDtype.bfloat16: torch.bfloat16, ComputeDtype.float32: torch.float32}


def build_mesh(device_type: str, *, shard_size: int | None) -> DeviceMesh:
    """Return the mesh [shard] for one copy of the weights, [replicate, shard] for several.

    `shard_size` is the number of consecutive ranks that share a copy, None for all; it must divide
    the number of ranks. With several copies, gradients are summed over all ranks and weights are
    gathered within a copy (hybrid sharding; Zhao et al. 2023, section 3.2.2).
    """
    num_ranks = dist.get_world_size()
    size = shard_size or num_ranks
    assert num_ranks % size == 0, f"{num_ranks} ranks in copies of {size}"
    if size == num_ranks:
        return init_device_mesh(device_type, (num_ranks,), mesh_dim_names=("shard",))
    shape = (num_ranks // size, size)
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))


class Site(NamedTuple):
    """Settings that all models of a rank share: policy, critic and frozen models."""

    mesh: DeviceMesh
    device: torch.device
    compute_dtype: torch.dtype
    is_fused: bool
    on_forward: Callable[[], None] | None  # called after each forward pass, as a sign of progress

    @classmethod
    def of(
        cls, config: LearnerConfig, *, device: str, on_forward: Callable[[], None] | None = None
    ) -> Site:
        """Return the settings of this rank; a collective."""
        return cls(
            mesh=build_mesh(device, shard_size=config.shard_size),
            device=torch.device(device),
            compute_dtype=_DTYPES[config.compute_dtype],
            is_fused=config.fused is True,
            on_forward=on_forward,
        )

    def watch(self, model: nn.Module) -> None:
        """Call `on_forward` after each forward pass of `model`."""
        if (call := self.on_forward) is not None:
            model.register_forward_hook(lambda *_: call())
