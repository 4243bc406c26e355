"""The folder of a run's checkpoints: each appears whole or not at all, and `latest` names the last.

`latest` is written before the rename that it announces, so recovery after a kill never guesses:

- A commit writes and syncs all files in a hidden folder, the manifest last; then `latest` names the
  new checkpoint; then the folder gets its name. A checkpoint of the same step is hidden first, and
  removed when the new one has its name.
- A run that goes back to an earlier checkpoint first makes `latest` name it, and then sets the
  later ones aside as `step_N.abandoned`.

A kill or power cut between two of these steps leaves one of two things: a checkpoint that `latest`
names, whole but hidden, which `recover` renames; or later checkpoints, which the next resume sets
aside.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from april_rl import __version__
from april_rl.run.checkpointing.manifest import (
    CheckpointError,
    FileRecord,
    Manifest,
    read_manifest,
    record,
    verify,
    write_manifest,
)

LATEST = "latest"  # file that contains the name of the last checkpoint
SCORE = "score"  # key in the manifest for the value of checkpoint.best_metric at that step
_PREFIX, _PARTIAL, _REMOVED, _ABANDONED = "step_", ".partial", ".removed", ".abandoned"


class Saved(NamedTuple):
    """A checkpoint in a run's folder, identified by name."""

    step: int
    path: Path


def begin(root: Path, step: int) -> Path:
    """Remove what interrupted saves left, and return a new, empty folder for a checkpoint."""
    root.mkdir(parents=True, exist_ok=True)
    recover(root)
    for left in root.glob(f".{_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)
    partial = root / f".{_PREFIX}{step}{_PARTIAL}"
    partial.mkdir()
    return partial


def recover(root: Path) -> None:
    """Rename the checkpoint that `latest` names, if a kill has left it hidden. No other process
    may write to `root` meanwhile.
    """
    path = latest(root)
    if path is not None and path.name.startswith("."):
        path.rename(root / path.name.removeprefix(".").removesuffix(path.suffix))
        sync(root)


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

    `records` holds the files that their writers already synced and hashed, by path in the
    folder; all other files are synced and hashed here. Raises CheckpointError when a file in
    `records` is not visible on this machine or one of `required` is missing, OSError when the
    disk fails.
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
            version=__version__,
            about=about,
            files=dict(sorted(files.items())),
        ),
        partial,
    )
    for folder in {path.parent for path in partial.rglob("*")}:
        sync(folder)
    path = partial.with_name(f"{_PREFIX}{step}")
    _point_to(path)
    replaced = _hide(path) if path.exists() else None  # a stop may save the same step again
    partial.rename(path)
    sync(path.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)
    return path


def list_saved(root: Path) -> list[Saved]:
    """Return the checkpoints of a run, oldest first, by looking at folder names only."""
    found = []
    for path in root.glob(f"{_PREFIX}*"):
        number = path.name.removeprefix(_PREFIX)
        if number.isdecimal() and path.is_dir():
            found.append(Saved(int(number), path))
    return sorted(found)


def list_abandoned(root: Path) -> list[Path]:
    """Return the checkpoints of abandoned branches, the oldest first."""
    return sorted(root.glob(f"{_PREFIX}*{_ABANDONED}*"), key=lambda path: path.stat().st_mtime_ns)


def is_abandoned(path: Path) -> bool:
    return path.name.startswith(_PREFIX) and _ABANDONED in path.name


def latest(root: Path) -> Path | None:
    """Return the checkpoint that `latest` names (hidden, if a kill came before `recover` renamed
    it), else the newest with a readable manifest, or None. Changes nothing.
    """
    try:
        named = root / (root / LATEST).read_text(encoding="utf-8").strip()
    except OSError:
        named = None
    if named is not None and named.parent == root:
        if named.is_dir():
            return named
        for hidden in (named.with_name(f".{named.name}{end}") for end in (_PARTIAL, _REMOVED)):
            if _is_whole(hidden):
                return hidden
    for one in reversed(list_saved(root)):
        try:
            read_manifest(one.path)
        except CheckpointError:
            continue
        return one.path
    return None


def set_aside_later(path: Path) -> list[Path]:
    """Make the checkpoint `path` the last one of its folder; return the new names of later ones.

    They belong to a branch that the run leaves: they stay, as step_N.abandoned, until `prune` is
    asked to remove them, and no run resumes from them in this folder.
    """
    root, step = path.parent, read_manifest(path).step
    later = [one.path for one in list_saved(root) if one.step > step]
    if later or latest(root) != path:
        _point_to(path)
    return [one.rename(_free_name(one.with_name(f"{one.name}{_ABANDONED}"))) for one in later]


def _free_name(path: Path) -> Path:
    """Return `path`, or if it exists the first unused one of path.2, path.3, ..."""
    names = (path.with_name(f"{path.name}.{number}") for number in count(2))
    return path if not path.exists() else next(name for name in names if not name.exists())


def prune(
    root: Path, *, keep_last: int, keep_best: int, keep_abandoned: int | None = None
) -> list[Path]:
    """Remove all but the `keep_last` newest and the `keep_best` highest-scoring checkpoints, never
    the one that `latest` names, and all but the `keep_abandoned` last abandoned ones (None: keep
    all). Return the removed paths.
    """
    found, left = list_saved(root), list_abandoned(root)
    kept = {one.path for one in best_of(found)[:keep_best]} | {latest(root)}
    removed = [one.path for one in found[: max(0, len(found) - keep_last)] if one.path not in kept]
    if keep_abandoned is not None:
        removed += left[: max(0, len(left) - keep_abandoned)]
    for path in removed:
        # Hide the folder first, so that a kill never leaves half of it under its name.
        shutil.rmtree(_hide(path), ignore_errors=True)
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


def _hide(path: Path) -> Path:
    hidden = path.with_name(f".{path.name}{_REMOVED}")
    shutil.rmtree(hidden, ignore_errors=True)  # it is left over from a removal that was killed
    return path.rename(hidden)


def _point_to(path: Path) -> None:
    pointer = path.parent / LATEST
    partial = pointer.with_name(f".{LATEST}{_PARTIAL}")
    partial.write_text(f"{path.name}\n", encoding="utf-8")
    sync(partial)
    partial.replace(pointer)
    sync(path.parent)
