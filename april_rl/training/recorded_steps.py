"""The groups of steps, written so that `python -m april_rl replay` can train them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from april_rl.run.checkpointing.columns import read_state, state_files, write_state
from april_rl.run.checkpointing.manifest import CheckpointError
from april_rl.training.rollout.codec import (
    Plain,
    restore_prompt,
    restore_ready_group,
    restore_sample,
    save_prompt,
    save_ready_group,
    save_sample,
)
from april_rl.types import Sample, ScoredGroup

_FOLDER = "recorded"


class RecordedStep(NamedTuple):
    """The samples of a step."""

    groups: Sequence[ScoredGroup]
    probes: Sequence[Sample]  # samples that are only compared with the engine


class RecordedSteps:
    """The recorded steps of a run."""

    def __init__(self, run_dir: Path, *, keep: int | str, tell: Callable[[str], None]) -> None:
        """Keep the newest `keep` steps, or all; `tell` gets a line if the disk fails."""
        self._run_dir, self._keep, self._tell = run_dir, keep, tell

    def write(self, step: int, recorded: RecordedStep) -> None:
        """Write the groups that `step` is about to train, and remove the step that is too old."""
        if self._keep == 0:
            return
        folder = self._run_dir / _FOLDER
        state = {
            "groups": [save_ready_group(group) for group in recorded.groups],
            "probes": [
                {"prompt": save_prompt(s.prompt), "index": s.index, "spans": save_sample(s)}
                for s in recorded.probes
            ],
        }
        try:
            folder.mkdir(exist_ok=True)
            write_state(state, folder, _name(step))
            if not isinstance(self._keep, str):
                for file in state_files(_name(step - self._keep)):
                    (folder / file).unlink(missing_ok=True)
        except OSError as error:
            self._tell(f"step {step} is not recorded: {error}; training continues")


def read_recorded(run_dir: Path, step: int) -> RecordedStep:
    """Return what `step` trained. Raise CheckpointError if it was not recorded."""
    folder = run_dir / _FOLDER
    if not (folder / state_files(_name(step))[0]).is_file():
        found = sorted(int(path.stem.removeprefix("step_")) for path in folder.glob("step_*.json"))
        steps = f"steps {found[0]} to {found[-1]}" if found else "no step"
        raise CheckpointError(
            f"step {step} of {run_dir} is not recorded, {steps} is: train with "
            "trainer.record_steps=all, or a number of steps to keep"
        )
    state = read_state(folder, _name(step))
    groups = [restore_ready_group(group) for group in state["groups"]]
    return RecordedStep(groups, [_restore_probe(probe) for probe in state["probes"]])


def _restore_probe(state: Plain) -> Sample:
    prompt = restore_prompt(state["prompt"])
    return restore_sample(state["spans"], prompt=prompt, index=state["index"])


def _name(step: int) -> str:
    return f"step_{step:05d}"
