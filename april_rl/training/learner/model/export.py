"""Write the sharded weights as a Hugging Face folder, one tensor at a time."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from april_rl.errors import ExportError
from april_rl.run.checkpointing.exports import INDEX, SINGLE_FILE, TEMPLATES
from april_rl.run.checkpointing.file_mode import mode_of_new_files
from april_rl.training.learner.model.sizes import SHARD_BYTES

# Files to copy: tokenizer and generation settings. Files about the weights are written again, and
# an index of weights in another format would name files that the export lacks.
_COPIED = (".json", ".txt", ".model", ".jinja")
_WRITTEN = re.compile(r"config\.json|.*\.index(\.\w+)?\.json")


def plan_shards(sizes: Sequence[int], *, max_bytes: int) -> list[int]:
    """Return the file number (from 0) of each tensor, keeping their order.

    `sizes` and `max_bytes` are in bytes. Only a file with a single tensor may exceed `max_bytes`.
    """
    files: list[int] = []
    file, used = 0, 0
    for size in sizes:
        if used and used + size > max_bytes:
            file, used = file + 1, 0
        files.append(file)
        used += size
    return files


def export(
    weights: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype,
    sizes: Sequence[int],
    source: Path,
    target: Path,
    max_bytes: int = SHARD_BYTES,
    also: Callable[[Path], None] | None = None,
) -> None:
    """Write `weights` and the other files of the folder `source` into the folder `target`.

    A collective: every rank iterates over `weights`, rank 0 writes. `sizes` lists the
    bytes of `weights` in order; most have `dtype`, which config.json names. `max_bytes` bounds a
    file. `also` may write more files into the folder it gets.

    The folder appears whole or not at all. A folder that is there already is replaced once the new
    one is complete: a resumed run exports again what it had exported after its checkpoint.

    Raise ExportError on rank 0 when a file cannot be written, after all ranks have iterated to the
    end.
    """
    files = plan_shards(sizes, max_bytes=max_bytes)
    partial = target.with_name(f".{target.name}.partial")
    left, failure = iter(weights), ""
    if dist.get_rank() == 0:
        try:
            _write(left, dtype=dtype, files=files, source=source, partial=partial)
            if also is not None:
                also(partial)
            _put(partial, target)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            failure = str(error) or repr(error)
    for _ in left:  # the other ranks take part in gathering each tensor
        pass
    dist.barrier()
    if failure:
        raise ExportError(f"the policy could not be exported to {target} ({failure})")


def _write(
    weights: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype,
    files: Sequence[int],
    source: Path,
    partial: Path,
) -> None:
    """Write all files into the folder `partial`, which is emptied first."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write_tensors(weights, files=files, folder=partial)
    for file in (*source.iterdir(), *source.glob(TEMPLATES)):
        if file.suffix in _COPIED and not _WRITTEN.fullmatch(file.name):
            copy = partial / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
    config = AutoConfig.from_pretrained(source)
    config.dtype = dtype
    config.save_pretrained(partial)


def _put(partial: Path, target: Path) -> None:
    """Rename a complete folder to `target`, and replace the folder that has this name."""
    replaced = target.with_name(f".{target.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        os.rename(target, replaced)
    os.rename(partial, target)
    shutil.rmtree(replaced, ignore_errors=True)


def _write_tensors(
    weights: Iterable[tuple[str, Tensor]], *, files: Sequence[int], folder: Path
) -> None:
    """Write one safetensors file, or several with an index."""
    num_files = files[-1] + 1
    names = [
        SINGLE_FILE if num_files == 1 else f"model-{i + 1:05d}-of-{num_files:05d}.safetensors"
        for i in range(num_files)
    ]
    weight_map: dict[str, str] = {}
    total_bytes = 0
    pending: dict[str, Tensor] = {}
    for i, (name, tensor) in enumerate(weights):
        pending[name] = tensor.cpu()
        weight_map[name] = names[files[i]]
        total_bytes += tensor.nbytes
        if i + 1 == len(files) or files[i + 1] != files[i]:
            path = folder / names[files[i]]
            with mode_of_new_files(path):
                save_file(pending, path, metadata={"format": "pt"})
            pending.clear()
    if num_files > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2))
