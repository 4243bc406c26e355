"""Which checkpoint a run goes on from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from april_rl.checkpointing.checkpointer import STATE
from april_rl.checkpointing.columns import DamagedStateError, Plain, read_state
from april_rl.checkpointing.folder import latest, saved
from april_rl.checkpointing.manifest import CheckpointError, Manifest, read_manifest, verify

CHECKPOINTS = "checkpoints"  # the folder in a run's directory
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Resumed:
    """A checkpoint that was read and found whole."""

    path: Path
    manifest: Manifest
    state: Plain  # of the controller


def unfinished_run(folder: Path) -> Path | None:
    """Return the run directory in `folder` that wrote a checkpoint last and did not finish; None
    when there is none.
    """
    newest: tuple[float, Path] | None = None
    for root in folder.glob(f"*/{CHECKPOINTS}"):
        path = latest(root)
        if path is None:
            continue
        try:
            is_finished = bool(read_manifest(path).about.get("is_finished"))
        except CheckpointError:
            is_finished = False  # damaged: loading it will say so, and offer an earlier one
        written = path.stat().st_mtime
        if not is_finished and (newest is None or written > newest[0]):
            newest = written, root.parent
    return newest[1] if newest else None


def load(resume: str, run_dir: Path) -> Resumed | None:
    """Return the checkpoint that the setting `resume` means, after checking every file of it; None
    when `resume=auto` finds none in the run directory.

    Raises CheckpointError for one that is damaged, with the newest good one beside it.
    """
    root = run_dir / CHECKPOINTS
    path = latest(root) if resume == AUTO else Path(resume)
    if path is None:
        return None
    if not path.is_dir():
        raise CheckpointError(f"resume={resume} is not a folder; give a run's checkpoints/step_N")
    try:
        manifest = verify(path)
        return Resumed(path, manifest, read_controller(path))
    except (CheckpointError, DamagedStateError) as error:
        raise CheckpointError(f"{error}\n{_offer(path)}") from error


def read_controller(path: Path) -> Plain:
    """Return the controller's state in a checkpoint; raises DamagedStateError."""
    return read_state(path, STATE)


def _offer(damaged: Path) -> str:
    """Name the newest whole checkpoint beside a damaged one."""
    for one in reversed(saved(damaged.parent)):
        try:
            if one.path != damaged:
                verify(one.path)
                return f"The newest whole checkpoint beside it: resume={one.path}"
        except CheckpointError:
            continue
    return "There is no whole checkpoint beside it."
