"""A Hugging Face folder of safetensors, read slice by slice: no rank holds a whole model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor

from april_rl.errors import RunError
from april_rl.learner.names import Part
from april_rl.learner.shards import local_shard, overlap, within

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
NUM_NAMED = 3  # differences an error message shows of each kind

# Older checkpoints have rope frequencies, which are computed: with these ends of names.
_COMPUTED = (".rotary_emb.inv_freq",)

# What a folder on the hub has besides weights in other formats.
_HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")


class CheckpointError(RunError):
    """The folder in model.path is not one the learner can load."""


def local_folder(model_path: str) -> Path:
    """The folder of a model: `model_path` itself, or the hub's snapshot of that id.

    Raises CheckpointError when it is neither.
    """
    if Path(model_path).is_dir():
        return Path(model_path)
    try:
        return Path(snapshot_download(model_path, allow_patterns=list(_HUB_FILES)))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"model.path={model_path} is neither a folder nor a model that the Hugging Face hub "
            f"gives: {error}"
        ) from error


class Checkpoint:
    """The tensors of a folder by name."""

    def __init__(self, folder: Path) -> None:
        """Reads names only; raises CheckpointError when there are no safetensors, or not all."""
        self._folder = folder
        self._files = _files_of_tensors(folder)  # file of each tensor name

    def check_names(self, names: Iterable[str], *, optional: Iterable[str]) -> None:
        """Raise CheckpointError unless the folder has exactly the tensors `names`.

        `optional` may be there and is not read: the output layer of a model that shares it. Nor
        are buffers that are computed.
        """
        missing = sorted(set(names) - set(self._files))
        unknown = set(self._files) - set(names) - set(optional)
        surplus = sorted(name for name in unknown if not name.endswith(_COMPUTED))
        if not missing and not surplus:
            return
        raise CheckpointError(
            f"model.path={self._folder}: the tensors of the checkpoint are not the parameters of "
            f"the model its config.json describes; {_first(missing)} missing, {_first(surplus)} "
            "unknown. Multimodal and quantised checkpoints are not supported, and experts are read "
            "under the names that transformers saves them with"
        )

    def load_into(self, parts: Iterable[tuple[Part, Tensor]]) -> None:
        """Fill each local shard of a parameter with what it holds of each part, cast to its dtype.

        Only that is read. Raises CheckpointError when a shape differs or a file cannot be read.
        """
        with ExitStack() as stack, torch.no_grad():
            opened = {
                file: stack.enter_context(_opened(self._folder / file))
                for file in sorted(set(self._files.values()))
            }
            for part, parameter in parts:
                file = self._files[part.name]
                with _readable(self._folder / file):
                    source = opened[file].get_slice(part.name)  # type: ignore[no-untyped-call]
                if tuple(source.get_shape()) != tuple(part.shape):
                    raise CheckpointError(
                        f"model.path={self._folder}: {part.name} has shape {source.get_shape()}, "
                        f"its config.json says {list(part.shape)}"
                    )
                local, held = local_shard(parameter)
                common = overlap(held, part.box)
                if all(along.start < along.stop for along in common):
                    stored = within(common, part.box)[-len(part.shape) :]
                    # What is read is a view of the mapped file: no memory beside the shard.
                    local[within(common, held)].copy_(source[stored])


def _files_of_tensors(folder: Path) -> dict[str, str]:
    if (folder / INDEX).exists():
        return _indexed(folder)
    if not (folder / SINGLE_FILE).exists():
        raise CheckpointError(
            f"model.path={folder} has neither {SINGLE_FILE} nor {INDEX}: "
            "save the model with save_pretrained, which writes safetensors"
        )
    with _opened(folder / SINGLE_FILE) as file:
        return dict.fromkeys(file.keys(), SINGLE_FILE)  # type: ignore[no-untyped-call]


def _indexed(folder: Path) -> dict[str, str]:
    """What the index says; raises CheckpointError when it, or a file it names, is not there."""
    try:
        files: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"model.path={folder}: {INDEX} cannot be read ({error!r}); fetch it again"
        ) from error
    absent = sorted(file for file in set(files.values()) if not (folder / file).exists())
    if absent:
        raise CheckpointError(
            f"model.path={folder}: files that {INDEX} names are not there: {_first(absent)}; fetch "
            "them again"
        )
    return files


@contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    """A safetensors file; raises CheckpointError when it is none, or only the start of one."""
    with ExitStack() as stack:
        with _readable(path):
            file = stack.enter_context(safe_open(path, framework="pt"))
        yield file


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """What safetensors says against a file becomes a CheckpointError that names it."""
    try:
        yield
    except SafetensorError as error:
        raise CheckpointError(
            f"model.path={path.parent}: {path.name} cannot be read ({error}); a download that was "
            "interrupted leaves such a file: fetch it again"
        ) from error


def _first(names: list[str]) -> str:
    """'2 (a, b)' with at most the first few of them."""
    shown = ", ".join(names[:NUM_NAMED]) + (", ..." if len(names) > NUM_NAMED else "")
    return f"{len(names)} ({shown})" if names else "none"
