"""When checkpoints are written, and that a failing disk does not end the run."""

import time
import weakref
from pathlib import Path

import pytest
from clock import Clock

from april_rl.config.schema import CheckpointConfig
from april_rl.metrics import Metrics
from april_rl.run.checkpointing import checkpointer
from april_rl.run.checkpointing.checkpointer import BackgroundWrite, Checkpointer, Written
from april_rl.run.checkpointing.folder import latest, list_saved
from april_rl.run.checkpointing.manifest import read_manifest, record, verify
from april_rl.run.checkpointing.resume import load


class Workers:
    """Workers that write a file at once and report it, or an error, after some polls."""

    def __init__(self) -> None:
        self.answers_after = 0
        self.error = ""

    def start_saving(self, folder: Path) -> list[str]:
        self.folder, self.asked = folder, 0
        folder.mkdir()
        (folder / "rank_00000.safetensors").write_bytes(b"weights")
        return ["rank_00000.safetensors"]

    def poll_save(self) -> Written | None:
        self.asked += 1
        if self.asked <= self.answers_after:
            return None
        name = "rank_00000.safetensors"
        return Written(records={name: record(self.folder / name)}, error=self.error)


class Setup:
    def __init__(self, root: Path, **changes: object) -> None:
        self.root, self.workers, self.clock = root, Workers(), Clock()
        self.told: list[str] = []
        self.checkpointer = Checkpointer(
            root,
            CheckpointConfig(**changes),
            workers=self.workers,
            config_text="name: test\n",
            about={"name": "test"},
            tell=self.told.append,
            clock=self.clock,
        )

    def save(self, step: int) -> None:
        self.checkpointer.start(step, {"version": step}, about={"ledger": {}})
        self.checkpointer.finish()


@pytest.fixture
def setup(tmp_path):
    return lambda **changes: Setup(tmp_path / "checkpoints", **changes)


def test_every_file_of_a_checkpoint_is_written_and_hashed(setup, tmp_path):
    run = setup()
    run.save(3)
    manifest = verify(latest(run.root))
    assert set(manifest.files) == {
        "config.yaml",
        "run.json",
        "run.safetensors",
        "learner/rank_00000.safetensors",
    }
    resumed = load("auto", tmp_path)
    assert resumed.state == {"version": 3}
    assert resumed.manifest.about == {"name": "test", "ledger": {}}
    assert run.checkpointer.metrics().read()["checkpoint/bytes"] > 0
    assert run.checkpointer.metrics() == {}


@pytest.mark.parametrize(
    ("changes", "due"),
    [
        ({"every_steps": 3, "every_minutes": None}, {3, 6, 9}),
        ({"every_steps": None, "every_minutes": 4}, {4, 8}),
        ({"every_steps": 3, "every_minutes": 2}, {2, 3, 5, 6, 8, 9}),
        ({"every_steps": None, "every_minutes": None}, set()),
    ],
)
def test_checkpoints_are_due_by_steps_and_by_time(setup, changes, due):
    """A step takes a minute here. Fails when the time counts from the start of the run, or one of
    the two settings overrides the other.
    """
    run, found = setup(**changes), set()
    for step in range(1, 10):
        run.clock.now_s += 60
        if run.checkpointer.is_due(step):
            found.add(step)
            run.save(step)
    assert found == due


def test_a_checkpoint_appears_only_when_every_worker_has_finished_writing(setup):
    run = setup()
    run.workers.answers_after = 2
    run.checkpointer.start(1, {}, about={})
    seen = []
    for _ in range(6000):
        run.checkpointer.poll()
        seen.append(latest(run.root) is not None)
        if seen[-1]:
            break
        time.sleep(0.01)  # a thread writes in the meantime
    assert seen[:2] == [False, False]
    assert seen[-1]


def test_a_checkpoint_begins_only_after_the_previous_one_is_finished(setup):
    run = setup()
    run.workers.answers_after = 3
    run.checkpointer.start(1, {}, about={})
    run.checkpointer.start(2, {}, about={})
    assert [one.step for one in list_saved(run.root)] == [1]
    run.checkpointer.finish()
    assert [one.step for one in list_saved(run.root)] == [1, 2]


def test_the_checkpoint_with_the_best_evaluation_is_kept(setup):
    """Fails when a score belongs to another step, or another run's rule is used."""
    metric = "eval/held_out/avg_at_k"
    run = setup(keep_last=1, best_metric=metric)
    for step, score in enumerate((0.2, 0.9, 0.5, 0.7, None, 0.1), start=1):
        if score is not None:
            run.checkpointer.note_evaluation(step, Metrics({metric: score}))
        run.save(step)
    assert [one.step for one in list_saved(run.root)] == [2, 6]
    assert read_manifest(run.root / "step_2").about["score"] == 0.9


def test_a_full_disk_of_a_worker_fails_only_that_checkpoint(setup):
    """Fails when the run ends, the message hides the reason, or half a checkpoint remains."""
    run = setup()
    run.save(1)
    run.workers.error = "[Errno 28] No space left on device: 'rank_00000.safetensors'"
    run.save(2)
    assert [one.step for one in list_saved(run.root)] == [1]
    assert "step 2 could not be written ([Errno 28] No space left" in run.told[-1]
    assert f"the last good one is {run.root / 'step_1'}" in run.told[-1]
    run.workers.error = ""
    run.save(3)
    assert latest(run.root) == run.root / "step_3"
    assert sorted(path.name for path in run.root.iterdir()) == ["latest", "step_1", "step_3"]


@pytest.mark.parametrize("error", [MemoryError(), TypeError("not JSON"), OSError(28, "No space")])
def test_a_writer_that_fails_in_any_way_fails_only_that_checkpoint(setup, tmp_path, error):
    """In the controller and in a worker. Fails when half a checkpoint is announced as complete."""
    run = setup()
    run.save(1)

    def failing(*_: object) -> list[Path]:
        raise error

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpointer, "write_state", failing)
        run.save(2)
    saving = BackgroundWrite(failing, tmp_path)
    while (written := saving.outcome()) is None:
        time.sleep(0.01)
    run.workers.error = written.error
    run.save(3)
    for step in (2, 3):
        said = [line for line in run.told if f"checkpoint of step {step} could not be" in line]
        assert len(said) == 1
        assert type(error).__name__ in said[0] or str(error) in said[0]
    assert [one.step for one in list_saved(run.root)] == [1]


def test_a_worker_that_writes_less_than_it_announced_fails_the_checkpoint(setup):
    """Fails when a checkpoint without the shards of a rank gets its name."""
    run = setup()
    real = run.workers.start_saving
    run.workers.start_saving = lambda folder: [*real(folder), "rank_00001.safetensors"]
    run.save(1)
    assert "lacks learner/rank_00001.safetensors" in run.told[-1]
    assert latest(run.root) is None
    assert run.checkpointer.last is None


def test_the_run_knows_which_checkpoint_it_would_resume(setup):
    run = setup()
    assert run.checkpointer.last is None
    run.save(2)
    assert run.checkpointer.last == run.root / "step_2"
    run.workers.error = "no space"
    run.save(3)
    assert run.checkpointer.last == run.root / "step_2"


def test_a_folder_that_cannot_be_created_fails_only_that_checkpoint(setup):
    run = setup()
    run.root.parent.mkdir(exist_ok=True)
    run.root.write_text("a file where the folder should be")
    run.save(1)
    assert "the checkpoint of step 1 could not be written" in run.told[-1]
    assert "training continues, and there is no earlier one" in run.told[-1]


def test_a_folder_that_disappears_during_a_save_fails_only_that_checkpoint(setup):
    run = setup()
    run.save(1)
    run.workers.answers_after = 1
    run.checkpointer.start(2, {}, about={})
    for path in run.workers.folder.iterdir():
        path.unlink()
    run.workers.poll_save = lambda: Written(
        records={"rank_00000.safetensors": record(Path(__file__))}
    )
    run.checkpointer.finish()
    assert "step 2 could not be written" in run.told[-1]
    assert latest(run.root) == run.root / "step_1"


def test_a_worker_frees_its_copy_as_soon_as_it_is_written(tmp_path):
    """Fails when the copy of the last checkpoint still exists while the next one is made."""

    class Copy:
        def write(self, folder: Path) -> list[Path]:
            path = folder / "rank_00000.safetensors"
            path.write_bytes(b"weights")
            return [path]

    copy = Copy()
    is_there = weakref.ref(copy)
    saving = BackgroundWrite(copy.write, tmp_path)
    del copy
    deadline = time.monotonic() + 60
    while (written := saving.outcome()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert list(written.records) == ["rank_00000.safetensors"]
    assert is_there() is None
