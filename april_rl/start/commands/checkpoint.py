"""`python -m april_rl checkpoint show|verify|list|prune PATH`: what a run has saved."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from april_rl.errors import RunError
from april_rl.types import Group

_USAGE = """usage: python -m april_rl checkpoint show|verify PATH
       python -m april_rl checkpoint list RUN
       python -m april_rl checkpoint prune RUN [keep_last=N] [keep_best=N] [keep_abandoned=N]

  show     step, ledger, groups by state and age, sizes, and the command line to resume
  verify   every file against the size and the hash in manifest.json
  list     all checkpoints of a run, the oldest first; at the end the ones of abandoned branches
  prune    remove all but the newest (2 unless keep_last=N is given) and the best (0 unless
           keep_best=N is given) by the metric checkpoint.best_metric; abandoned ones stay unless
           keep_abandoned=N is given

PATH is a checkpoint (RUN/checkpoints/step_N) or a run directory, whose last checkpoint is used.
Resume it with: python -m april_rl.train ... resume=PATH"""

_NOT_AGAIN = ("resume", "sweep")  # overrides that the resume command does not repeat
_FEWEST = {"keep_last": 1, "keep_best": 0, "keep_abandoned": 0}  # options and their least values


def main(arguments: Sequence[str]) -> int:
    """Run what `arguments` name and return the exit status."""
    actions = {"show": _show, "verify": _verify, "list": _list, "prune": _prune}
    wanted, *words = arguments or ("--help",)
    if wanted in ("-h", "--help"):
        print(_USAGE)
        return 0
    if wanted not in actions:
        near = get_close_matches(wanted, actions, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose {', '.join(actions)}"
        return _refuse(f"checkpoint has no {wanted}; {hint}")
    paths, kept = [], {}
    for word in words:
        key, is_set, value = word.partition("=")
        if not (is_set and key.isidentifier()):
            paths.append(Path(word))
            continue
        if key not in _FEWEST:
            return _refuse(f"{key} is not an option; prune takes {', '.join(_FEWEST)}")
        if not (value.isdecimal() and int(value) >= _FEWEST[key]):
            return _refuse(f"{key} must be a number >= {_FEWEST[key]}, got {value}")
        kept[key] = int(value)
    if len(paths) != 1 or (kept and wanted != "prune"):
        return _refuse(f"{wanted} takes one PATH, got {' '.join(words) or 'none'}\n{_USAGE}")
    try:
        actions[wanted](paths[0], **kept)
    except OSError as error:
        raise RunError(str(error)) from error
    return 0


def _refuse(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _show(path: Path) -> None:
    from april_rl.run.checkpointing.manifest import read_manifest
    from april_rl.run.checkpointing.resume import checkpoint_at, read_controller
    from april_rl.training.rollout.codec import restore_group

    folder = checkpoint_at(path)
    manifest = read_manifest(folder)
    about = manifest.about
    collector = read_controller(folder)["collector"]
    print(f"{folder}: step {manifest.step} of {about['num_steps']}, {manifest.created}")
    print(f"run        {about['name']}, written by april_rl {manifest.version}")
    print(f"model      {about['model']}")
    print("ledger     " + _ledger(collector["ledger"]))
    for name, key in (("parked", "open"), ("ready", "ready")):
        groups = [restore_group(group) for group in collector["buffer"][key]]
        print(f"{name:<10} " + _groups(groups, version=manifest.step))
    for top in sorted({name.partition("/")[0] for name in manifest.files}):
        files = [of for name, of in manifest.files.items() if name.partition("/")[0] == top]
        size = sum(of.bytes for of in files) / 2**20
        hashes = files[0].xxh3 if len(files) == 1 else f"{len(files)} files"
        print(f"  {top:<18} {size:>10.2f} MiB  {hashes}")
    print(f"resume     {_command(folder, about)}")
    print("           docs/checkpoints.md lists the settings that may change")


def _command(folder: Path, about: Mapping[str, Any]) -> str:
    """Return the command line that resumes a checkpoint: the last one of a run in its directory.
    `...` stands for settings that the checkpoint does not record.
    """
    from april_rl.run.checkpointing.folder import latest

    given = [
        each
        for each in about.get("overrides", ())
        if each.lstrip("+~").partition("=")[0] not in _NOT_AGAIN
    ]
    where = [f"resume={folder}"]
    if latest(folder.parent) == folder:
        where.append(f"hydra.run.dir={folder.parent.parent}")
    return f"python -m april_rl.train {shlex.join(given) or '...'} {shlex.join(where)}"


def _ledger(ledger: dict[str, Any]) -> str:
    counts = ", ".join(f"{n} {state}" for state, n in ledger.items() if state != "opened")
    return f"{ledger['opened']} opened: {counts}"


def _groups(groups: Sequence[Group], *, version: int) -> str:
    """Return a line with the number of groups, their response tokens and their ages."""
    tokens = sum(sample.num_tokens for group in groups for sample in group.samples)
    oldest = [group.oldest_version for group in groups]
    ages = Counter(0 if sampled is None else version - sampled for sampled in oldest)
    by_age = ", ".join(f"{count} of age {age}" for age, count in sorted(ages.items()))
    return f"{len(groups)} groups with {tokens:,} response tokens" + (f": {by_age}" if ages else "")


def _verify(path: Path) -> None:
    from april_rl.run.checkpointing.manifest import verify
    from april_rl.run.checkpointing.resume import checkpoint_at

    folder = checkpoint_at(path)
    manifest = verify(folder, on_file=lambda name: print(f"  {name}", flush=True))
    print(f"{folder}: all {len(manifest.files)} files match the manifest")


def _list(path: Path) -> None:
    from april_rl.run.checkpointing.folder import SCORE, latest, list_abandoned, list_saved
    from april_rl.run.checkpointing.manifest import CheckpointError, read_manifest

    root = _root(path)
    last, total_bytes = latest(root), 0
    left, found = list_abandoned(root), [one.path for one in list_saved(root)]
    for one in [*found, *left]:
        try:
            manifest = read_manifest(one)
        except CheckpointError as error:
            print(f"{one}  {error}")
            continue
        num_bytes = sum(of.bytes for of in manifest.files.values())
        total_bytes += num_bytes
        mark = "  latest" if one == last else ""
        if SCORE in manifest.about:
            mark += f"  {manifest.about['best_metric']} {manifest.about[SCORE]:.3f}"
        print(f"{one}  {manifest.created}  {num_bytes / 2**20:.1f} MiB{mark}")
    size = f"{total_bytes / 2**20:.1f} MiB in total"
    print(f"checkpoints: {len(found)}, abandoned: {len(left)}, {size}")


def _prune(
    path: Path, *, keep_last: int = 2, keep_best: int = 0, keep_abandoned: int | None = None
) -> None:
    from april_rl.run.checkpointing.folder import prune, recover
    from april_rl.run.checkpointing.run_lock import RunOwnedError, own

    root = _root(path)
    try:
        with own(root.parent):
            recover(root)
            removed = prune(
                root, keep_last=keep_last, keep_best=keep_best, keep_abandoned=keep_abandoned
            )
    except RunOwnedError as error:
        raise RunOwnedError(
            f"{error}. The run prunes by itself: checkpoint.keep_last, checkpoint.best_metric"
        ) from error
    for one in removed:
        print(f"removed {one}")


def _root(path: Path) -> Path:
    from april_rl.run.checkpointing.manifest import CheckpointError
    from april_rl.run.checkpointing.resume import CHECKPOINTS

    root = path if path.name == CHECKPOINTS else path / CHECKPOINTS
    if not root.is_dir():
        raise CheckpointError(f"{path} has no folder {CHECKPOINTS}: give a run directory")
    return root
