"""The training state of a learner: master weights and AdamW's two moments, saved shard by shard.

Each rank writes its shards as one safetensors file, whose header says which box of the whole tensor
each one fills. Any number of ranks can read the files back: every rank fills its own shards from
the boxes that overlap. torch's own checkpoint format is not used, because its index is a pickle,
which may execute code when it is read, and its safetensors writer saves no scalars.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from april_rl.errors import RunError
from april_rl.run.checkpointing.file_mode import mode_of_new_files
from april_rl.training.learner.frozen_model import MovingReference
from april_rl.training.learner.model.names import Box
from april_rl.training.learner.model.shards import local_shard, overlap, within
from april_rl.training.learner.objective import EntropyBonus
from april_rl.training.learner.optimizer import Moments
from april_rl.training.learner.trained_model import TrainedModel

_FILE, _COUNTERS = "rank_{:05d}.safetensors", "optimizer.json"
_BOXES, _SHAPES = "boxes", "shapes"  # in a file's header, as JSON


class TrainingStateError(RunError):
    """The saved state of a learner belongs to another model or cannot be read."""


class Shard(NamedTuple):
    """The part of a tensor that one rank holds."""

    values: Tensor
    box: Box  # position in the whole tensor
    shape: torch.Size  # shape of the whole tensor


class Snapshot(NamedTuple):
    """Training state of one rank, copied to the host; training may continue while it is written."""

    rank: int
    shards: Mapping[str, Shard]  # empty when another rank writes the same shards
    counters: Mapping[str, Any]  # optimizer steps of each model, and state of the objective

    @property
    def file_names(self) -> list[str]:
        shards = [_FILE.format(self.rank)] if self.shards else []
        return [*shards, *([_COUNTERS] if self.rank == 0 else [])]

    def write(self, folder: Path) -> list[Path]:
        """Write this rank's files, make them durable and return their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.shards:
            _write_shards(self.shards, folder / _FILE.format(self.rank))
        if self.rank == 0:
            text = json.dumps(dict(self.counters)) + "\n"
            (folder / _COUNTERS).write_text(text, encoding="utf-8")
        paths = [folder / name for name in self.file_names]
        for path in paths:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        return paths


class TrainingState:
    """Master weights and optimizer state of one rank, on its device or offloaded to the host, and
    of a reference that moves during the run.
    """

    def __init__(
        self,
        models: Mapping[str, TrainedModel],
        *,
        mesh: DeviceMesh,
        entropy_bonus: EntropyBonus,
        reference: MovingReference | None = None,
    ) -> None:
        """Save and load `models`, which are keyed by the prefix of their tensor names; the policy
        has the prefix "". `reference` is given if the reference moves during the run.
        """
        self._models, self._entropy_bonus = models, entropy_bonus
        self._reference = reference
        has_copies = mesh.ndim == 2  # of several copies of the weights, only the first is written
        self._is_written = not has_copies or mesh.get_local_rank("replicate") == 0

    def snapshot(self) -> Snapshot:
        """Copy the training state to the host and return the copy."""
        for trained in self._models.values():
            trained.model.reshard_all()
        shards = dict(self._copies() if self._is_written else ())
        shards = {name: shard for name, shard in shards.items() if shard.values.numel()}
        num_steps = {_num_steps(p): one.optimizer.num_steps for p, one in self._models.items()}
        counters = {**num_steps, "entropy_bonus": self._entropy_bonus.save()}
        if self._reference is not None:
            counters["reference_age"] = self._reference.age
        return Snapshot(dist.get_rank(), shards, counters)

    def load(self, folder: Path) -> None:
        """Continue from the state in `folder`, which any number of ranks may have written.

        Raises TrainingStateError when the state belongs to another model or cannot be read.
        """
        try:
            counters = json.loads((folder / _COUNTERS).read_text(encoding="utf-8"))
            names = {prefix: _num_steps(prefix) for prefix in self._models}
            saved_names = {p: name for p, name in names.items() if name in counters or not p}
            num_steps = {prefix: int(counters[name]) for prefix, name in saved_names.items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TrainingStateError(
                f"{folder / _COUNTERS} cannot be read: {error!r}; resume from another checkpoint"
            ) from error
        for prefix in self._models.keys() - num_steps.keys():
            raise TrainingStateError(
                f"{folder} has no {prefix.removesuffix('.')}, and these settings train one; "
                "resume with the settings of that run"
            )
        for trained in self._models.values():
            trained.model.reshard_all()
            trained.masters.reload()
        self._entropy_bonus.restore(counters["entropy_bonus"])
        with ExitStack() as stack:
            saved = _Saved(folder, stack)
            wanted: dict[str, list[int]] = {}
            for prefix, trained in self._models.items():
                kinds = ("master", *(Moments._fields if num_steps[prefix] else ()))
                named = [*trained.model.named_trained_parameters(prefix)]
                wanted |= {f"{k}.{name}": list(p.shape) for name, p in named for k in kinds}
            wanted |= {name: list(p.shape) for name, p in self._of_reference()}
            saved.check(wanted)
            for prefix, trained in self._models.items():
                _load(trained, saved, prefix=prefix, num_steps=num_steps[prefix])
            if self._reference is not None:
                self._reference.age = counters["reference_age"]
                stack.enter_context(self._reference.weights.change())
            for name, parameter in self._of_reference():
                saved.fill(name, parameter)

    def _of_reference(self) -> Iterator[tuple[str, nn.Parameter]]:
        named = self._reference.shards() if self._reference else ()
        return ((f"reference.{name}", parameter) for name, parameter in named)

    def _copies(self) -> Iterator[tuple[str, Shard]]:
        """Yield the name and a host copy of each shard of master weights and moments."""
        for prefix, trained in self._models.items():
            for name, parameter in trained.model.named_trained_parameters(prefix):
                box, shape = local_shard(parameter)[1], parameter.shape
                yield f"master.{name}", Shard(trained.masters.host_copy(parameter), box, shape)
                moments = trained.optimizer.host_copy(parameter)
                for kind, values in moments._asdict().items() if moments else ():
                    yield f"{kind}.{name}", Shard(values, box, shape)
        for name, parameter in self._of_reference():
            assert self._reference is not None
            values = self._reference.weights.host_copy(parameter)
            yield name, Shard(values, local_shard(parameter)[1], parameter.shape)


def _num_steps(prefix: str) -> str:
    """Return the name of a model's count of optimizer steps."""
    return f"{prefix}num_optimizer_steps"


def _load(trained: TrainedModel, saved: _Saved, *, prefix: str, num_steps: int) -> None:
    """Fill weights and moments of a model."""
    names = {parameter: name for name, parameter in trained.model.named_trained_parameters(prefix)}
    for parameter, name in names.items():
        saved.fill(f"master.{name}", parameter)

    def fill(parameter: nn.Parameter, moments: Moments) -> None:
        for kind, tensor in moments._asdict().items():
            saved.fill(f"{kind}.{names[parameter]}", tensor)

    trained.optimizer.continue_after(num_steps, fill)


def _write_shards(shards: Mapping[str, Shard], path: Path) -> None:
    boxes = {name: [[one.start, one.stop] for one in shard.box] for name, shard in shards.items()}
    shapes = {name: list(shard.shape) for name, shard in shards.items()}
    metadata = {_BOXES: json.dumps(boxes), _SHAPES: json.dumps(shapes)}
    values = {name: shard.values.contiguous() for name, shard in shards.items()}
    with mode_of_new_files(path):
        save_file(values, path, metadata=metadata)


class _Saved:
    """The files of shards in a folder, which any number of ranks may have written."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._files = [_Opened(path, stack) for path in sorted(folder.glob("rank_*.safetensors"))]

    def check(self, wanted: Mapping[str, list[int]]) -> None:
        """Raise TrainingStateError unless the files hold tensors of these names and shapes."""
        shapes: dict[str, list[int]] = {}
        for file in self._files:
            shapes |= file.shapes
        if not shapes:
            raise TrainingStateError(
                f"{self._folder} has no learner files (rank_*.safetensors); resume from another "
                "checkpoint"
            )
        for name in sorted(wanted.keys() | shapes.keys()):
            if wanted.get(name) != shapes.get(name):
                raise TrainingStateError(
                    f"{self._folder} is of another model: {name} has shape "
                    f"{shapes.get(name, 'none')} there and {wanted.get(name, 'none')} in the model "
                    "that model.path, lora.*, critic.* and algorithm.reference_every describe; "
                    "resume with the settings of that run"
                )

    def fill(self, name: str, tensor: Tensor) -> None:
        """Fill the local values of `tensor`; raise TrainingStateError if the files lack some."""
        shard = Shard(*local_shard(tensor), tensor.shape)
        num_missing = shard.values.numel() - sum(f.copy_into(shard, name) for f in self._files)
        if num_missing:
            raise TrainingStateError(
                f"{self._folder}: {num_missing} of the {shard.values.numel()} numbers of {name} "
                "that this worker needs are missing from its files; resume from another checkpoint"
            )


class _Opened:
    """An open file of shards."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path = path
        try:
            self._file = stack.enter_context(safe_open(path, framework="pt"))
            header = self._file.metadata()
            self.boxes: dict[str, list[list[int]]] = json.loads(header[_BOXES])
            self.shapes: dict[str, list[int]] = json.loads(header[_SHAPES])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise TrainingStateError(
                f"{path} cannot be read: {error!r}; resume from another checkpoint"
            ) from error

    @torch.no_grad()
    def copy_into(self, shard: Shard, name: str) -> int:
        """Copy the stored numbers that overlap a shard into it; return how many."""
        if name not in self.boxes:
            return 0
        stored = tuple(slice(*one) for one in self.boxes[name])
        common = overlap(stored, shard.box)
        if any(along.start >= along.stop for along in common):
            return 0
        try:
            # The slice is a view of the mapped file.
            source: Tensor = self._file.get_slice(name)[within(common, stored)]
        except SafetensorError as error:
            raise TrainingStateError(
                f"{self._path}: {name} cannot be read: {error}; resume from another checkpoint"
            ) from error
        shard.values[within(common, shard.box)].copy_(source)
        return source.numel()
