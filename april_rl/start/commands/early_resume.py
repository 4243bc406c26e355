"""Report whether a run begins, continues or is over already, before torch is imported."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from april_rl.config import TrainConfig
from april_rl.config.store import ConfigError
from april_rl.run.checkpointing.exports import export_path
from april_rl.run.checkpointing.folder import latest
from april_rl.run.checkpointing.manifest import CheckpointError, read_manifest
from april_rl.run.checkpointing.resume import AUTO, CHECKPOINTS, checkpoint_at
from april_rl.run.tracking.tracker import check_unused


def is_over(config: TrainConfig, run_dir: Path) -> bool:
    """Check `resume` against the run directory, and print a line if a new run begins or no step is
    left. Return whether resume=auto has nothing to do, for example because a job script was
    started again. Raise RunError for a missing checkpoint, a directory that holds another run,
    or a checkpoint with nothing left to train.
    """
    if config.resume is None:
        check_unused(run_dir)
        return False
    root = run_dir / CHECKPOINTS
    is_auto = config.resume == AUTO
    path = latest(root) if is_auto else checkpoint_at(Path(config.resume), key="resume=")
    if path is None:
        print(_new_run(run_dir), flush=True)
        return False
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return False  # loading the checkpoint will name the newest undamaged one
    num_steps = config.trainer.num_steps
    if manifest.step < num_steps:
        return False
    run = path.parent.parent
    said = f"{run} is already at step {manifest.step} of trainer.num_steps={num_steps}"
    has_export = export_path(run, manifest.step).is_dir()
    if not (manifest.about.get("is_finished") and has_export):
        print(f"{said}: no step is left; the run is evaluated and exported", flush=True)
        return False
    message = f"{said}; nothing to train: set trainer.num_steps higher to continue"
    if not is_auto:
        raise ConfigError(message)
    print(message, flush=True)
    return True


def _new_run(run_dir: Path) -> str:
    begins = f"a new run begins in {run_dir}"
    finished = []
    for root in run_dir.parent.glob(f"*/{CHECKPOINTS}"):
        with suppress(CheckpointError):
            if (path := latest(root)) is not None:
                finished.append((path.stat().st_mtime, root.parent, read_manifest(path).step))
    if not finished:
        return f"resume=auto found no unfinished run to continue: {begins}"
    _, run, step = max(finished)
    return (
        f"resume=auto found no unfinished run to continue, {run} has finished at step {step}: "
        f"{begins}. To train the finished one longer: resume={run} hydra.run.dir={run} "
        f"trainer.num_steps={2 * step}"
    )
