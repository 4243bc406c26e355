"""What a learner needs to go on training: masters and both AdamW moments, shard by shard.

Each rank writes the shards it holds as one safetensors file; the header says which box of the whole
tensor each one is. So any number of ranks can read them back: every rank fills its own shards with
what overlaps. torch's own checkpoint format is not used: its index is a pickle, which may execute
anything when it is read, and its safetensors writer keeps no scalars.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from april_rl.errors import RunError
from april_rl.learner.names import Box
from april_rl.learner.offload import Offloadable
from april_rl.learner.optimizer import Optimizer
from april_rl.learner.policy import Policy
from april_rl.learner.shards import local_shard, overlap, within

_FILE, _COUNTERS = "rank_{:05d}.safetensors", "optimizer.json"
_BOXES, _SHAPES = "boxes", "shapes"  # in a file's header, as JSON


class TrainingStateError(RunError):
    """The saved state of a learner is not one of this model, or cannot be read."""


class Shard(NamedTuple):
    """What one rank holds of a tensor."""

    values: Tensor
    box: Box  # where it lies in the whole
    shape: torch.Size  # of the whole


class Snapshot(NamedTuple):
    """What a rank writes, copied to the host: training may go on while it is written."""

    rank: int
    shards: Mapping[str, Shard]  # empty where another rank holds the same
    num_optimizer_steps: int

    def write(self, folder: Path) -> list[Path]:
        """Write this rank's files, and make them durable; returns their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        if self.shards:
            paths.append(folder / _FILE.format(self.rank))
            _write_shards(self.shards, paths[-1])
        if self.rank == 0:
            paths.append(folder / _COUNTERS)
            counters = {"num_optimizer_steps": self.num_optimizer_steps}
            paths[-1].write_text(json.dumps(counters) + "\n", encoding="utf-8")
        for path in paths:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        return paths


class TrainingState:
    """Masters and moments of one rank, wherever they are at the time: device or host."""

    def __init__(
        self,
        policy: Policy,
        optimizer: Optimizer,
        *,
        mesh: DeviceMesh,
        masters: Offloadable,
        moments: Offloadable,
    ) -> None:
        self._policy, self._optimizer = policy, optimizer
        self._masters, self._moments = masters, moments
        has_copies = mesh.ndim == 2  # the first of several copies of the weights is enough
        self._is_written = not has_copies or mesh.get_local_rank("replicate") == 0

    def snapshot(self) -> Snapshot:
        """Copy everything to the host."""
        self._policy.reshard_all()
        shards = {
            name: Shard(holder.host_copy(tensor), local_shard(tensor)[1], tensor.shape)
            for name, tensor, holder in (self._tensors() if self._is_written else ())
        }
        shards = {name: shard for name, shard in shards.items() if shard.values.numel()}
        return Snapshot(dist.get_rank(), shards, self._optimizer.num_steps)

    def restore(self, folder: Path) -> None:
        """Go on where the state in `folder` was saved, by any number of ranks.

        Raises TrainingStateError when it is of another model or cannot be read.
        """
        try:
            counters = json.loads((folder / _COUNTERS).read_text(encoding="utf-8"))
            num_steps = int(counters["num_optimizer_steps"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TrainingStateError(f"{folder / _COUNTERS} cannot be read: {error!r}") from error
        self._policy.reshard_all()
        self._masters.reload()
        self._moments.reload()
        self._optimizer.restore(num_steps)
        shards = {
            name: Shard(*local_shard(tensor), tensor.shape) for name, tensor, _ in self._tensors()
        }
        read_shards(shards, folder)

    def _tensors(self) -> Iterator[tuple[str, Tensor, Offloadable]]:
        """Return every tensor with its name and what may have moved it to the host."""
        for name, parameter in self._policy.named_parameters():
            if not parameter.requires_grad:
                continue
            yield f"master.{name}", parameter, self._masters
            moments = self._optimizer.moments_of(parameter)
            if moments is not None:
                yield f"exp_avg.{name}", moments[0], self._moments
                yield f"exp_avg_sq.{name}", moments[1], self._moments


def _write_shards(shards: Mapping[str, Shard], path: Path) -> None:
    boxes = {name: [[one.start, one.stop] for one in shard.box] for name, shard in shards.items()}
    shapes = {name: list(shard.shape) for name, shard in shards.items()}
    save_file(
        {name: shard.values.contiguous() for name, shard in shards.items()},
        path,
        metadata={_BOXES: json.dumps(boxes), _SHAPES: json.dumps(shapes)},
    )


def read_shards(shards: Mapping[str, Shard], folder: Path) -> None:
    """Fill the values of `shards` from the files that any number of ranks have written.

    Raises TrainingStateError when the files hold other tensors, or other shapes, than the model
    has, when a part of a shard is in none of them, or when one cannot be read.
    """
    with ExitStack() as stack:
        files = [_Opened(path, stack) for path in sorted(folder.glob("rank_*.safetensors"))]
        _check_names(shards, files, folder)
        for name, shard in shards.items():
            num_found = sum(file.copy_into(shard, name) for file in files)
            if num_found != shard.values.numel():
                raise TrainingStateError(
                    f"{folder}: {shard.values.numel() - num_found} of the {shard.values.numel()} "
                    f"numbers of {name} that this worker needs are in none of its files"
                )


class _Opened:
    """A file of shards."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path = path
        try:
            self._file = stack.enter_context(safe_open(path, framework="pt"))
            header = self._file.metadata()
            self.boxes: dict[str, list[list[int]]] = json.loads(header[_BOXES])
            self.shapes: dict[str, list[int]] = json.loads(header[_SHAPES])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise TrainingStateError(f"{path} cannot be read: {error!r}") from error

    @torch.no_grad()
    def copy_into(self, shard: Shard, name: str) -> int:
        """Copy what the file holds of a shard; returns how many numbers."""
        if name not in self.boxes:
            return 0
        stored = tuple(slice(*one) for one in self.boxes[name])
        common = overlap(stored, shard.box)
        if any(along.start >= along.stop for along in common):
            return 0
        try:
            # What is read is a view of the mapped file.
            source: Tensor = self._file.get_slice(name)[within(common, stored)]
        except SafetensorError as error:
            raise TrainingStateError(f"{self._path}: {name} cannot be read: {error}") from error
        shard.values[within(common, shard.box)].copy_(source)
        return source.numel()


def _check_names(shards: Mapping[str, Shard], files: Iterable[_Opened], folder: Path) -> None:
    shapes: dict[str, list[int]] = {}
    for file in files:
        shapes |= file.shapes
    wanted = {name: list(shard.shape) for name, shard in shards.items()}
    if not shapes:
        raise TrainingStateError(f"{folder} holds no files of a learner")
    for name in sorted(wanted.keys() | shapes.keys()):
        if wanted.get(name) != shapes.get(name):
            raise TrainingStateError(
                f"{folder} is of another model: {name} has shape "
                f"{shapes.get(name, 'none')} there and {wanted.get(name, 'none')} in the model "
                "that model.path and lora.* describe"
            )
