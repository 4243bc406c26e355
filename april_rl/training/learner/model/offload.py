"""Free device memory that an idle learner does not need, and keep the values on the host.

A tensor and its storage stay the same objects; only the memory behind the storage is freed and
allocated again. So every reference to the tensor (in FSDP, the optimizer, a view) stays valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

Tensors = Callable[[], Iterable[Tensor]]


class _Copy(NamedTuple):
    """A storage and a copy of its bytes on the host."""

    storage: UntypedStorage
    host: Tensor  # [bytes], uint8


class Offloadable:
    """Tensors that are either on their device, or on the host with their device memory freed."""

    def __init__(
        self, tensors: Tensors, *, device: torch.device, is_constant: bool = False
    ) -> None:
        """Move the tensors that `tensors` returns at each offload; for a DTensor, its local shard.
        The values of constant ones are copied to the host by the first offload only, and after
        `change`.

        Host memory is allocated at the first offload and kept; it is pinned if `device` is an
        accelerator.
        """
        self._tensors, self._device, self._is_constant = tensors, device, is_constant
        self._is_copied = False
        self._copies: dict[int, _Copy] = {}  # by the address of the storage object
        self._is_away = False

    def offload(self) -> None:
        """Copy the values to the host and free the device memory, unless that is done already."""
        if self._is_away:
            return
        self._copies = {
            storage._cdata: self._copies.get(storage._cdata) or self._room(storage)
            for storage in map(_storage, self._tensors())
        }
        if not (self._is_constant and self._is_copied):
            for storage, host in self._copies.values():
                host.copy_(_bytes(storage), non_blocking=True)
            wait(self._device)
        self._is_copied = True
        for storage, _ in self._copies.values():
            storage.resize_(0)
        self._is_away = True

    def reload(self) -> None:
        """Allocate device memory and copy the values back, unless they are there already."""
        if not self._is_away:
            return
        for storage, host in self._copies.values():
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=True)
        wait(self._device)
        self._is_away = False

    @contextmanager
    def change(self) -> Iterator[None]:
        """Have the tensors on their device within this context, where constant ones may change."""
        self.reload()
        yield
        self._is_copied = False
        self.offload()

    def host_copy(self, tensor: Tensor) -> Tensor:
        """Return a host copy of a tensor's local values, wherever the values are now."""
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
    """Wait until all work queued on `device` has finished."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def return_cached_memory(device: torch.device) -> None:
    """Free the memory that torch's allocator caches on `device`, so that others can use it."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def _storage(tensor: Tensor) -> UntypedStorage:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()


def _bytes(storage: UntypedStorage) -> Tensor:
    """Return the storage as a tensor [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
