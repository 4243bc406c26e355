"""Find and load the checkpoint from which a run resumes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from april_rl.run.checkpointing.checkpointer import STATE
from april_rl.run.checkpointing.columns import Plain, read_state
from april_rl.run.checkpointing.exports import EXPORTS
from april_rl.run.checkpointing.folder import (
    is_abandoned,
    latest,
    list_abandoned,
    list_saved,
    recover,
)
from april_rl.run.checkpointing.manifest import FILE as MANIFEST
from april_rl.run.checkpointing.manifest import CheckpointError, Manifest, read_manifest, verify
from april_rl.run.checkpointing.run_lock import FILE as LOCK
from april_rl.run.checkpointing.run_lock import owner_of

CHECKPOINTS = "checkpoints"  # folder name within a run directory
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Resumed:
    """A checkpoint that was read and passed all checks."""

    path: Path
    manifest: Manifest
    state: Plain  # the controller's state

    def is_within(self, run_dir: Path) -> bool:
        """Return whether the run continues in its directory; a copy elsewhere is another run."""
        return self.path.resolve().is_relative_to(run_dir.resolve())


def unfinished_run(folder: Path) -> Path | None:
    """Return the directory of an active run, or else of the unfinished run that saved last."""
    newest: tuple[float, Path] | None = None
    for lock in folder.glob(f"*/{LOCK}"):
        if owner_of(lock.parent) is not None:
            return lock.parent  # the run is active, and its directory will be refused by name
    for root in folder.glob(f"*/{CHECKPOINTS}"):
        path = latest(root)
        if path is None:
            continue
        try:
            is_finished = bool(read_manifest(path).about.get("is_finished"))
        except CheckpointError:
            is_finished = False  # it is damaged: `load` will report it and offer an earlier one
        written = path.stat().st_mtime
        if not is_finished and (newest is None or written > newest[0]):
            newest = written, root.parent
    return newest[1] if newest else None


def load(resume: str, run_dir: Path) -> Resumed | None:
    """Return the checkpoint selected by the setting `resume`, after checking every file of it. The
    caller owns `run_dir`. The only change there is the name of a checkpoint that a kill has left
    hidden.

    `resume` is `auto`, a checkpoint, a run directory or its folder of checkpoints; the last two
    mean its last checkpoint. Returns None when `resume=auto` finds none in the run directory.
    Raises CheckpointError when it is damaged, naming the newest undamaged one of the same run, and
    when it belongs to a branch that the run has left.
    """
    root = run_dir / CHECKPOINTS
    recover(root)
    path = latest(root) if resume == AUTO else checkpoint_at(Path(resume), key="resume=")
    if path is None:
        _refuse_to_start_again(run_dir)
        return None
    is_own = path.resolve().is_relative_to(run_dir.resolve())
    if is_own and is_abandoned(path):
        raise CheckpointError(
            f"resume={resume} belongs to a branch that {run_dir} has left: resume it in a "
            "directory of its own, hydra.run.dir=FOLDER, or continue the run with resume=auto"
        )
    if list_saved(root) and not is_own:
        raise CheckpointError(
            f"resume={resume} is another run's, but {run_dir} has checkpoints of its own: give a "
            "new hydra.run.dir=FOLDER"
        )
    try:
        manifest = verify(path)
        return Resumed(path, manifest, read_controller(path))
    except CheckpointError as error:
        raise CheckpointError(f"{error}\n{_offer(path)}") from error


def checkpoint_at(path: Path, *, key: str = "") -> Path:
    """Return the checkpoint at `path`: itself, or the last one of a run directory or of its folder
    of checkpoints. Raise CheckpointError when there is none; its message begins with `key`.
    """
    if (path / MANIFEST).is_file() or path.parent.name == CHECKPOINTS:
        root, found = path.parent, path if path.is_dir() else None
    else:
        root = path if path.name == CHECKPOINTS else path / CHECKPOINTS
        found = latest(root)
    if found is not None:
        return found
    if (path / "config.json").is_file():
        run = path.parent.parent if path.parent.name == EXPORTS else "the directory of its run"
        uses = f"{key}{run} continues the run, model.path={path} begins a new one"
        raise CheckpointError(
            f"{key}{path} is a policy without its optimizer and its data: "
            f"{uses if key else f'give {run}'}"
        )
    paths = [*(one.path for one in list_saved(root)), *list_abandoned(root)]
    names = ", ".join(path.name for path in paths) or "no checkpoint"
    raise CheckpointError(
        f"{key}{path} is neither a checkpoint (RUN/checkpoints/step_N) nor the directory of a run "
        f"that has one; {root} has {names}"
    )


def _refuse_to_start_again(run_dir: Path) -> None:
    """Raise CheckpointError if a run without a checkpoint of its own resumed from another one,
    which `auto` would ignore.
    """
    config = run_dir / "config.yaml"
    begun = yaml.safe_load(config.read_text(encoding="utf-8")) if config.is_file() else None
    origin = begun.get("resume") if isinstance(begun, dict) else None
    if origin not in (None, AUTO):
        raise CheckpointError(
            f"{run_dir} resumed from another checkpoint and has none of its own yet: give "
            f"resume={origin} again"
        )


def read_controller(path: Path) -> Plain:
    return read_state(path, STATE)


def _offer(damaged: Path) -> str:
    """Return a sentence that names the newest undamaged checkpoint in the same folder."""
    for one in reversed(list_saved(damaged.parent)):
        try:
            if one.path != damaged:
                verify(one.path)
                return f"The newest undamaged checkpoint in the same folder: resume={one.path}"
        except CheckpointError:
            continue
    return f"{damaged.parent} has no undamaged checkpoint; without resume a new run begins."
