"""Memory that a learner gives up while it has nothing to compute; the values wait on the host.

A tensor stays the object it is, and so does its storage: only the memory behind the storage goes
and comes back. Whoever refers to the tensor (FSDP, the optimizer, a view) need not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

Tensors = Callable[[], Iterable[Tensor]]


class _Copy(NamedTuple):
    """A storage and its bytes on the host."""

    storage: UntypedStorage
    host: Tensor  # [bytes], uint8


class Offloadable:
    """Tensors that are either on their device or, with their memory there given up, on the host."""

    def __init__(self, tensors: Tensors, *, device: torch.device) -> None:
        """`tensors` gives all of them, each time they are to leave; of a DTensor, the local shard.

        Host memory is taken at the first offload and kept, pinned when `device` is an accelerator.
        """
        self._tensors, self._device = tensors, device
        self._copies: dict[int, _Copy] = {}  # by the address of the storage object
        self._is_away = False

    def offload(self) -> None:
        """Copy the values to the host and give up the memory; nothing when that is done already."""
        if self._is_away:
            return
        self._copies = {
            storage._cdata: self._copies.get(storage._cdata) or self._room(storage)
            for storage in map(_storage, self._tensors())
        }
        for storage, host in self._copies.values():
            host.copy_(_bytes(storage), non_blocking=True)
        wait(self._device)
        for storage, _ in self._copies.values():
            storage.resize_(0)
        self._is_away = True

    def reload(self) -> None:
        """Take memory again and copy the values back; nothing when they are on their device."""
        if not self._is_away:
            return
        for storage, host in self._copies.values():
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=True)
        wait(self._device)
        self._is_away = False

    def host_copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor's local values on the host, wherever they are now."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        copy = self._copies.get(local.untyped_storage()._cdata) if self._is_away else None
        if copy is None:
            return local.detach().to("cpu", copy=True)
        values = torch.empty(0, dtype=local.dtype)
        values.set_(copy.host.untyped_storage(), 0, local.shape, local.stride())
        return values.clone()

    def _room(self, storage: UntypedStorage) -> _Copy:
        is_pinned = self._device.type != "cpu"
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=is_pinned)
        return _Copy(storage, host)


def wait(device: torch.device) -> None:
    """Return when what was asked of `device` is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def return_cached_memory(device: torch.device) -> None:
    """Leave to others on `device` what torch's allocator holds and does not use."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def _storage(tensor: Tensor) -> UntypedStorage:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()


def _bytes(storage: UntypedStorage) -> Tensor:
    """The storage as a tensor [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
