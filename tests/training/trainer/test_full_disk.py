"""A disk that is full when a run exports or writes its metrics."""

import errno
import os
from pathlib import Path

import pytest
from test_trainer import run, settings
from trainer_fakes import FakeWorkers

from april_rl.errors import ExportError
from april_rl.metrics import Metrics
from april_rl.run.checkpointing.manifest import verify
from april_rl.run.checkpointing.resume import CHECKPOINTS, load
from april_rl.run.supervision.failures import WorkerDiedError
from april_rl.run.tracking.metrics_file import MetricsFile
from april_rl.run.tracking.tracker import RunDirectoryError


class FullWorkers(FakeWorkers):
    """Workers that find no space for an export at some steps."""

    full_at: tuple[int, ...] = ()

    def export(self, path: Path) -> None:
        if int(path.name.removeprefix("step_")) in self.full_at:
            raise ExportError(f"the policy could not be exported to {path} (No space left)")
        super().export(path)


def test_a_run_whose_last_export_fails_keeps_its_last_checkpoint_and_says_so(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(FullWorkers, "full_at", (2,))
    with pytest.raises(ExportError) as failed:
        run(settings(num_steps=2), tmp_path, workers_type=FullWorkers)
    last = tmp_path / CHECKPOINTS / "step_2"
    assert verify(last).step == 2
    assert str(failed.value).endswith(
        f"step_2 (No space left); make room there, then resume=auto hydra.run.dir={tmp_path} "
        f"continues from {last}"
    )
    assert not isinstance(failed.value, WorkerDiedError), "it would be restarted"


def test_an_export_that_fails_before_the_end_is_reported_and_training_continues(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(FullWorkers, "full_at", (1,))
    workers = run(settings(num_steps=2, export_every=1), tmp_path, workers_type=FullWorkers)
    assert [name for name, _ in workers.exports] == ["step_2"]
    assert "step_1 (No space left); training continues" in capsys.readouterr().out


def test_a_run_that_can_no_longer_write_its_metrics_says_how_to_continue(
    tmp_path: Path, monkeypatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def update(*_: object) -> Metrics:
        monkeypatch.setattr(MetricsFile, "append", full)
        return Metrics()

    monkeypatch.setattr(FakeWorkers, "update", update)
    with pytest.raises(RunDirectoryError) as failed:
        run(settings(num_steps=2), tmp_path)
    assert str(failed.value) == (
        f"the run directory {tmp_path} cannot be written (No space left on device); make room "
        f"there, then resume=auto hydra.run.dir={tmp_path} continues from the beginning, since no "
        "checkpoint was written"
    )


def test_a_resumed_run_writes_the_missing_export(tmp_path: Path, monkeypatch) -> None:
    with monkeypatch.context() as full:
        full.setattr(FullWorkers, "full_at", (2,))
        with pytest.raises(ExportError):
            run(settings(num_steps=2), tmp_path, workers_type=FullWorkers)
    again = run(settings(num_steps=2), tmp_path, resumed=load("auto", tmp_path))
    assert [name for name, _ in again.exports] == ["step_2"]
