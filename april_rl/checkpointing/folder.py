"""The folder of a run's checkpoints: each appears whole or not at all, and `latest` names the last.

Order of a commit: files are synced as they are written, then the manifest, the folder, the rename,
the parent folder, and last the pointer. So a kill or a power cut at any moment leaves every earlier
checkpoint as it was, and at most a hidden partial folder, which the next save removes.
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

LATEST = "latest"  # a file with the name of the last checkpoint
SCORE = "score"  # in a manifest: the value of checkpoint.best_metric at the step
_PREFIX, _PARTIAL, _REMOVED = "step_", ".partial", ".removed"


class Saved(NamedTuple):
    """A checkpoint in a run's folder."""

    step: int
    path: Path


def begin(root: Path, step: int) -> Path:
    """Return a new empty folder for the files of a checkpoint; removes what an earlier save that
    did not end has left.
    """
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(f".{_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)
    partial = root / f".{_PREFIX}{step}{_PARTIAL}"
    partial.mkdir()
    return partial


def commit(
    partial: Path, *, step: int, about: Mapping[str, Any], records: Mapping[str, FileRecord]
) -> Path:
    """Make the files of `partial` the checkpoint of `step`, and return its path.

    `records` are those of files that their writers have synced and hashed, by path in the folder;
    the other files are synced and hashed here. Raises CheckpointError when one of `records` cannot
    be seen from here, OSError when the disk refuses.
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
                f"{partial / name} was written by a worker and is not there on the controller's "
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
        _remove(path)  # of an earlier life of the run, which went on from before it
    partial.rename(path)
    sync(path.parent)
    _point_to(path)
    return path


def discard(partial: Path) -> None:
    """Remove a checkpoint that will not be finished."""
    shutil.rmtree(partial, ignore_errors=True)


def saved(root: Path) -> list[Saved]:
    """Return the checkpoints of a run, the oldest first; only their names are looked at."""
    found = []
    for path in root.glob(f"{_PREFIX}*"):
        number = path.name.removeprefix(_PREFIX)
        if path.is_dir() and number.isdecimal():
            found.append(Saved(int(number), path))
    return sorted(found)


def latest(root: Path) -> Path | None:
    """Return the checkpoint that `latest` names; where that is missing, the one of the last step
    that has a manifest; None when there is none.
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
    """Remove all but the `keep_last` newest checkpoints and the `keep_best` with the highest score;
    return what was removed.
    """
    found = saved(root)
    best = best_of(found)[:keep_best]
    removed = [one for one in found[: max(0, len(found) - keep_last)] if one not in best]
    for one in removed:
        _remove(one.path)
    return removed


def best_of(found: Iterable[Saved]) -> list[Saved]:
    """Return the checkpoints that have a score, the highest first; of equal ones the later."""
    scored = []
    for one in found:
        with suppress(CheckpointError):
            score = read_manifest(one.path).about.get(SCORE)
            if score is not None:
                scored.append((float(score), one))
    return [one for _, one in sorted(scored, reverse=True)]


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _remove(path: Path) -> None:
    """Remove a checkpoint so that a kill meanwhile leaves no half of it under its name."""
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
