"""The folder of a run's checkpoints: each appears whole or not at all, and `latest` names the last.

A commit syncs, in this order: the files as they are written, the manifest, the folder, the rename,
the parent folder, and last the pointer. A checkpoint that it replaces is renamed, and removed only
when the new one has its name. So a kill or power cut at any moment leaves every earlier checkpoint
intact, or hidden and whole, in which case `recover` gives it its name back.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from april_rl.checkpointing.manifest import (
    CheckpointError,
    FileRecord,
    Manifest,
    read_manifest,
    record,
    verify,
    write_manifest,
)

LATEST = "latest"  # file that contains the name of the last checkpoint
SCORE = "score"  # manifest key of the value of checkpoint.best_metric at that step
_PREFIX, _PARTIAL, _REMOVED, _ABANDONED = "step_", ".partial", ".removed", ".abandoned"


class Saved(NamedTuple):
    """A checkpoint in a run's folder, identified by name."""

    step: int
    path: Path


def begin(root: Path, step: int) -> Path:
    """Return a new, empty folder for a checkpoint; remove what interrupted saves left behind."""
    root.mkdir(parents=True, exist_ok=True)
    recover(root)
    for left in root.glob(f".{_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)
    partial = root / f".{_PREFIX}{step}{_PARTIAL}"
    partial.mkdir()
    return partial


def recover(root: Path) -> None:
    """Give a checkpoint its name back that a kill took from it: while the same step was saved
    again, or while it was removed. Let `latest` name one that a kill kept it from naming. Call it
    only where no other process writes into `root`.
    """
    for removed in root.glob(f".{_PREFIX}*{_REMOVED}"):
        path = root / removed.name.removeprefix(".").removesuffix(_REMOVED)
        for whole in (root / f".{path.name}{_PARTIAL}", removed):
            if not path.exists() and _is_whole(whole):
                whole.rename(path)
                sync(root)
    found, last = saved(root), latest(root)
    if last is not None and found and found[-1].path != last and _is_whole(found[-1].path):
        _point_to(found[-1].path)  # no later ones stay beside `latest`: see set_aside_later


def _is_whole(folder: Path) -> bool:
    try:
        verify(folder, hashes=False)
    except CheckpointError:
        return False
    return True


def commit(
    partial: Path,
    *,
    step: int,
    about: Mapping[str, Any],
    records: Mapping[str, FileRecord],
    required: Iterable[str],
) -> Path:
    """Turn the files of `partial` into the checkpoint of `step`; return its path.

    `records` holds the files that their writers already synced and hashed, by path in the folder;
    all other files are synced and hashed here. Raises CheckpointError when a file in `records` is
    not visible on this machine or one of `required` is missing, OSError when the disk refuses.
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
    if missing := sorted(set(required) - files.keys()):
        raise CheckpointError(f"{partial} lacks {', '.join(missing)}, without which it is useless")
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
    replaced = _hide(path) if path.exists() else None  # of the same step, saved again by a stop
    partial.rename(path)
    sync(path.parent)
    _point_to(path)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)
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


def set_aside_later(path: Path) -> list[Path]:
    """Make the checkpoint `path` the last one of its folder; return the new names of later ones.

    They belong to a branch that the run leaves: they stay, as step_N.abandoned, and no other
    function here counts them.
    """
    root, step = path.parent, read_manifest(path).step
    later = [one.path for one in saved(root) if one.step > step]
    aside = [one.rename(_unused(one.with_name(f"{one.name}{_ABANDONED}"))) for one in later]
    if aside:
        _point_to(path)
    return aside


def _unused(path: Path) -> Path:
    """Return `path`, or, where it exists, the first of path.2, path.3, ... that does not."""
    names = (path.with_name(f"{path.name}.{number}") for number in count(2))
    return path if not path.exists() else next(name for name in names if not name.exists())


def prune(root: Path, *, keep_last: int, keep_best: int) -> list[Saved]:
    """Remove all but the `keep_last` newest and the `keep_best` highest-scoring checkpoints; never
    the one that `latest` names.

    Returns the removed checkpoints.
    """
    found = saved(root)
    best = best_of(found)[:keep_best]
    last = latest(root)
    older = [one for one in found[: max(0, len(found) - keep_last)] if one.path != last]
    removed = [one for one in older if one not in best]
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
    """Remove a checkpoint; hide it first, so that a kill leaves no half of it under its name."""
    shutil.rmtree(_hide(path), ignore_errors=True)


def _hide(path: Path) -> Path:
    hidden = path.with_name(f".{path.name}{_REMOVED}")
    shutil.rmtree(hidden, ignore_errors=True)  # of an earlier removal that was killed
    return path.rename(hidden)


def _point_to(path: Path) -> None:
    pointer = path.parent / LATEST
    partial = pointer.with_name(f".{LATEST}{_PARTIAL}")
    partial.write_text(f"{path.name}\n", encoding="utf-8")
    sync(partial)
    partial.replace(pointer)
    sync(path.parent)
