"""The folder of a run's checkpoints: each appears whole or not at all, and `latest` names the last.

A commit syncs, in this order: the files as they are written, the manifest, the folder, the rename,
the parent folder, and last the pointer. So a kill or power cut at any moment leaves every earlier
checkpoint intact, and at most a hidden partial folder, which the next save removes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from april_rl.checkpointing.manifest import (
    CheckpointError,
    FileRecord,
    Manifest,
    read_manifest,
    record,
    write_manifest,
)

LATEST = "latest"  # file that contains the name of the last checkpoint
SCORE = "score"  # manifest key of the value of checkpoint.best_metric at that step
_PREFIX, _PARTIAL, _REMOVED = "step_", ".partial", ".removed"


class Saved(NamedTuple):
    """A checkpoint in a run's folder, identified by name."""

    step: int
    path: Path


def begin(root: Path, step: int) -> Path:
    """Return a new, empty folder for a checkpoint; remove what interrupted saves left behind."""
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(f".{_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)
    partial = root / f".{_PREFIX}{step}{_PARTIAL}"
    partial.mkdir()
    return partial


def commit(
    partial: Path, *, step: int, about: Mapping[str, Any], records: Mapping[str, FileRecord]
) -> Path:
    """Turn the files of `partial` into the checkpoint of `step`; return its path.

    `records` holds the files that their writers already synced and hashed, by path in the folder;
    all other files are synced and hashed here. Raises CheckpointError when a file in `records` is
    not visible on this machine, OSError when the disk refuses.
    """
    files = dict(records)
    for path in sorted(partial.rglob("*")):
        name = path.relative_to(partial).as_posix()
        if path.is_file() and name not in files:
            sync(path)
            files[name] = record(path)
    for name in records:
        if not (partial / name).is_file():
            raise CheckpointError(
                f"{partial / name} was written by a worker but is missing on the controller's "
                "machine: with several machines the run directory must be on a shared file system"
            )
    write_manifest(
        Manifest(
            step=step,
            created=datetime.now().astimezone().isoformat(timespec="seconds"),
            version=version("april_rl"),
            about=about,
            files=dict(sorted(files.items())),
        ),
        partial,
    )
    for folder in {path.parent for path in partial.rglob("*")}:
        sync(folder)
    path = partial.with_name(f"{_PREFIX}{step}")
    if path.exists():
        _remove(path)  # written before the run resumed from an earlier step
    partial.rename(path)
    sync(path.parent)
    _point_to(path)
    return path


def discard(partial: Path) -> None:
    """Remove the partial folder of a checkpoint that failed."""
    shutil.rmtree(partial, ignore_errors=True)


def saved(root: Path) -> list[Saved]:
    """Return the checkpoints of a run, oldest first, by looking at folder names only."""
    found = []
    for path in root.glob(f"{_PREFIX}*"):
        number = path.name.removeprefix(_PREFIX)
        if path.is_dir() and number.isdecimal():
            found.append(Saved(int(number), path))
    return sorted(found)


def latest(root: Path) -> Path | None:
    """Return the checkpoint that `latest` names, or None when the run has none.

    If that one is missing, returns the newest checkpoint with a readable manifest.
    """
    try:
        named = root / (root / LATEST).read_text(encoding="utf-8").strip()
    except OSError:
        named = None
    if named is not None and named.parent == root and named.is_dir():
        return named
    for one in reversed(saved(root)):
        try:
            read_manifest(one.path)
        except CheckpointError:
            continue
        return one.path
    return None


def prune(root: Path, *, keep_last: int, keep_best: int) -> list[Saved]:
    """Remove all but the `keep_last` newest and the `keep_best` highest-scoring checkpoints.

    Returns the removed checkpoints.
    """
    found = saved(root)
    best = best_of(found)[:keep_best]
    removed = [one for one in found[: max(0, len(found) - keep_last)] if one not in best]
    for one in removed:
        _remove(one.path)
    return removed


def best_of(found: Iterable[Saved]) -> list[Saved]:
    """Return the checkpoints that have a score, highest first; on a tie, the later one first."""
    scored = []
    for one in found:
        with suppress(CheckpointError):
            score = read_manifest(one.path).about.get(SCORE)
            if score is not None:
                scored.append((float(score), one))
    return [one for _, one in sorted(scored, reverse=True)]


def sync(path: Path) -> None:
    """Make the content of a file, or the entries of a folder, durable (fsync)."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _remove(path: Path) -> None:
    """Remove a checkpoint; rename it first, so that a kill leaves no half of it under its name."""
    going = path.with_name(f".{path.name}{_REMOVED}")
    path.rename(going)
    shutil.rmtree(going, ignore_errors=True)


def _point_to(path: Path) -> None:
    pointer = path.parent / LATEST
    partial = pointer.with_name(f".{LATEST}{_PARTIAL}")
    partial.write_text(f"{path.name}\n", encoding="utf-8")
    sync(partial)
    partial.replace(pointer)
    sync(path.parent)
