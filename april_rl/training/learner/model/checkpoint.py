"""Read a Hugging Face folder of safetensors slice by slice, so that no rank holds a whole model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor

from april_rl.errors import RunError
from april_rl.run.checkpointing.exports import INDEX, SINGLE_FILE
from april_rl.training.learner.model.names import Part, TextPrefixes
from april_rl.training.learner.model.shards import local_shard, overlap, within

NUM_NAMED = 3  # names an error message lists of each kind

# Name endings of rope frequencies, which older checkpoints store although the model computes them.
_COMPUTED = (".rotary_emb.inv_freq",)

# Files to download from the hub; weights in other formats than safetensors are left out.
_HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")


class ModelFolderError(RunError):
    """The learner cannot load the folder in model.path."""


def local_folder(model_path: str) -> Path:
    """Return the folder of a model: `model_path` itself, or the downloaded snapshot of that hub id.

    Raises ModelFolderError when `model_path` is neither.
    """
    if Path(model_path).is_dir():
        return Path(model_path)
    try:
        return Path(snapshot_download(model_path, allow_patterns=list(_HUB_FILES)))
    except (OSError, ValueError) as error:
        raise ModelFolderError(
            f"model.path={model_path} is neither a folder nor a model that can be downloaded from "
            f"the Hugging Face hub: {error}"
        ) from error


class Checkpoint:
    """Tensors of a checkpoint folder, by name."""

    def __init__(self, folder: Path) -> None:
        """Read the tensor names; raise ModelFolderError when safetensors files are missing."""
        self._folder = folder
        self._files = _files_of_tensors(folder)  # file of each tensor name

    @property
    def prefixes(self) -> TextPrefixes:
        """Return how the names of the text model's tensors begin."""
        return TextPrefixes.among(self._files)

    def find_untouched(
        self, names: Iterable[str], *, optional: Iterable[str], ignored: Sequence[str]
    ) -> list[str]:
        """Return the names of the tensors that are neither in `names` nor in `optional`. Raise
        ModelFolderError if the folder lacks one of `names`, or if a returned name matches none of
        the regular expressions in `ignored`.

        Tensors in `optional` may exist but are not needed, such as the output layer of a model with
        tied embeddings. Buffers that the model computes are left out.
        """
        missing = sorted(set(names) - set(self._files))
        unknown = set(self._files) - set(names) - set(optional)
        others = sorted(name for name in unknown if not name.endswith(_COMPUTED))
        unexpected = [name for name in others if not any(re.search(e, name) for e in ignored)]
        if not missing and not unexpected:
            return others
        raise ModelFolderError(
            f"model.path={self._folder}: the tensors of the checkpoint do not match the model in "
            f"its config.json: {_first(missing)} missing, {_first(unexpected)} unknown. Quantised "
            "checkpoints are not supported, and experts must have the names that transformers "
            "saves them with"
        )

    def check_tied(self, embedding: str, head: str) -> None:
        """Raise ModelFolderError if the output layer `head` is stored and is not the embedding,
        which a model with tied embeddings uses in its place.
        """
        if head not in self._files:
            return
        (_, first), (_, second) = self.tensors((embedding, head))
        if first.shape != second.shape or not torch.equal(first, second.to(first.dtype)):
            raise ModelFolderError(
                f"model.path={self._folder}: {head} differs from {embedding}, but config.json has "
                "tie_word_embeddings=true, so that one tensor is used for both; set it to false if "
                f"the model was trained with two, or save the model without {head}"
            )

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield these tensors as they are; raise ModelFolderError when a file cannot be read."""
        for name in names:
            path = self._folder / self._files[name]
            with _open(path) as file, _readable(path):
                yield name, file.get_tensor(name)  # type: ignore[no-untyped-call]

    def load_into(self, parts: Iterable[tuple[Part, Tensor]]) -> None:
        """Fill each parameter's local shard with its slices of the stored parts, cast to its dtype.

        Reads only those slices. Raises ModelFolderError when a shape differs or a file cannot be
        read.
        """
        with ExitStack() as stack, torch.no_grad():
            opened = {
                file: stack.enter_context(_open(self._folder / file))
                for file in sorted(set(self._files.values()))
            }
            for part, parameter in parts:
                file = self._files[part.name]
                with _readable(self._folder / file):
                    source = opened[file].get_slice(part.name)  # type: ignore[no-untyped-call]
                if tuple(source.get_shape()) != tuple(part.shape):
                    raise ModelFolderError(
                        f"model.path={self._folder}: {part.name} has shape {source.get_shape()}, "
                        f"but its config.json implies {list(part.shape)}; use a config.json and "
                        "weights that belong together"
                    )
                local, held = local_shard(parameter)
                common = overlap(held, part.box)
                if all(along.start < along.stop for along in common):
                    stored = within(common, part.box)[-len(part.shape) :]
                    # The slice is a view of the mapped file: no memory is needed beside the shard.
                    local[within(common, held)].copy_(source[stored])


def _files_of_tensors(folder: Path) -> dict[str, str]:
    if (folder / INDEX).exists():
        return _read_index(folder)
    if not (folder / SINGLE_FILE).exists():
        raise ModelFolderError(
            f"model.path={folder} has neither {SINGLE_FILE} nor {INDEX}: "
            "save the model with save_pretrained(), which writes safetensors"
        )
    with _open(folder / SINGLE_FILE) as file:
        return dict.fromkeys(file.keys(), SINGLE_FILE)  # type: ignore[no-untyped-call]


def _read_index(folder: Path) -> dict[str, str]:
    """Return the file of each tensor; raise ModelFolderError if the index or a file is missing."""
    try:
        files: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise ModelFolderError(
            f"model.path={folder}: {INDEX} cannot be read ({error!r}); download it again"
        ) from error
    absent = sorted(file for file in set(files.values()) if not (folder / file).exists())
    if absent:
        raise ModelFolderError(
            f"model.path={folder}: files listed in {INDEX} are missing: {_first(absent)}; download "
            "them again"
        )
    return files


@contextmanager
def _open(path: Path) -> Iterator[safe_open]:
    """Open a safetensors file; raise ModelFolderError when it is invalid or cut short."""
    with ExitStack() as stack:
        with _readable(path):
            file = stack.enter_context(safe_open(path, framework="pt"))
        yield file


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn a safetensors error into a ModelFolderError that names the file."""
    try:
        yield
    except SafetensorError as error:
        raise ModelFolderError(
            f"model.path={path.parent}: {path.name} cannot be read ({error}); the download may "
            "have been interrupted: download the file again"
        ) from error


def _first(names: list[str]) -> str:
    """Return the number of names with the first few of them, as in '2 (a, b)'."""
    shown = ", ".join(names[:NUM_NAMED]) + (", ..." if len(names) > NUM_NAMED else "")
    return f"{len(names)} ({shown})" if names else "none"
