"""The part of a whole tensor that a rank holds, and the overlap of two parts."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from april_rl.training.learner.model.names import Box


def local_shard(tensor: Tensor) -> tuple[Tensor, Box]:
    """Return this rank's shard of a tensor and the box it fills in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tensor, tuple(slice(0, size) for size in tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tensor.to_local(), tuple(
        slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)
    )


def overlap(a: Box, b: Box) -> Box:
    """Return the intersection of two boxes; ranges end before they start where it is empty."""
    return tuple(
        slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True)
    )


def within(inner: Box, outer: Box) -> Box:
    """Return `inner` relative to the start of `outer`."""
    return tuple(
        slice(x.start - y.start, x.stop - y.start) for x, y in zip(inner, outer, strict=True)
    )
