"""A resume changes a run's directory all at once when the run continues, and otherwise
not at all.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from test_trainer import run, settings
from trainer_fakes import FakeWorkers, rows_of

from april_rl.config import TrainConfig
from april_rl.config.schema import CheckpointConfig
from april_rl.errors import RunError
from april_rl.run.checkpointing.folder import list_saved
from april_rl.run.checkpointing.resume import CHECKPOINTS, load


def saving_each_step(num_steps: int) -> TrainConfig:
    every_step = CheckpointConfig(every_steps=1, keep_last=9)
    return replace(settings(num_steps=num_steps), checkpoint=every_step)


def content_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_resume_that_the_workers_refuse_changes_nothing(tmp_path: Path, monkeypatch) -> None:
    """The workers are the last to refuse. Fails when rows are cut, samples removed, config.yaml
    replaced or checkpoints set aside before that.
    """
    run(saving_each_step(4), tmp_path)
    before = content_of(tmp_path)
    assert any(path.parent.name == "samples" for path in before)

    def refuse(*_: object) -> None:
        raise RunError("the learner's files are of another model")

    monkeypatch.setattr(FakeWorkers, "load_state", refuse)
    for resume in ("auto", str(tmp_path / CHECKPOINTS / "step_2")):
        with pytest.raises(RunError, match="of another model"):
            run(saving_each_step(9), tmp_path, resumed=load(resume, tmp_path))
        assert content_of(tmp_path) == before, resume


def test_a_run_that_goes_back_sets_later_checkpoints_aside(tmp_path: Path) -> None:
    """Fails when checkpoints of the abandoned branch stay among the new ones: pruning would remove
    the new ones, and `auto` would resume from the old ones.
    """
    run(saving_each_step(5), tmp_path)
    root = tmp_path / CHECKPOINTS
    kept = [one.path.name for one in list_saved(root)]
    assert kept == [f"step_{step}" for step in range(1, 6)]
    run(saving_each_step(3), tmp_path, resumed=load(str(root / "step_2"), tmp_path))
    assert [one.path.name for one in list_saved(root)] == kept[:3]
    left = {path.name for path in root.glob("*.abandoned")}
    assert left == {f"step_{step}.abandoned" for step in (3, 4, 5)}
    assert [row["step"] for row in rows_of(tmp_path)] == [0, 1, 2, 3]
    resumed = load("auto", tmp_path)
    assert resumed is not None
    assert resumed.manifest.step == 3
