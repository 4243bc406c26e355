"""An error in a step loses nothing: what Ctrl-C saves is saved, and a resume continues from it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import own_filters
import pytest
from test_trainer import CountingScorer, run, settings
from trainer_fakes import FakeWorkers, NoInterrupts, rows_of

from april_rl.config.algorithm import AlgorithmConfig
from april_rl.config.choices import Advantage
from april_rl.config.task import RewardConfig
from april_rl.config.user_code import OwnFunctionError
from april_rl.errors import DataError, RunError
from april_rl.metrics import Metrics
from april_rl.run.checkpointing.resume import load
from april_rl.run.supervision.failures import WorkerDiedError
from april_rl.task.data.samplers import Shuffled
from april_rl.task.rewards.jobs import RewardError
from april_rl.training.algorithm.advantages import credits_of
from april_rl.training.batches import TeacherReply

NUM_STEPS, BEFORE = 6, 3  # the error comes in the step after BEFORE


class BrokenReward(CountingScorer):
    """Rewards that fail from the n-th call on, as a pool whose function returned no list does."""

    def __init__(self, number: int) -> None:
        super().__init__(delay=3)
        self.left = number

    def collect(self, timeout_s, look=None):  # noqa: ARG002
        self.left -= 1
        if self.left < 0:
            raise RewardError("a:f returned None")
        return super().collect(timeout_s)


class BrokenSampler(Shuffled):
    def draw(self) -> int:
        if self._epoch > 8:  # a set of one prompt: its epochs count the draws
            raise ValueError("no prompts left")
        return super().draw()


class BrokenTeacher:
    """A teacher on a server that fails, or is silent until somebody interrupts."""

    def __init__(self, error: RunError | None) -> None:
        self.num_asked, self.error = 0, error

    def logprobs(self, _groups: object, look: Callable[[], None]) -> Any:
        self.num_asked += 1
        if self.num_asked <= BEFORE:
            return TeacherReply({}, Metrics())
        if self.error is not None:
            raise self.error
        while True:
            look()


class LateInterrupt(NoInterrupts):
    """A signal that arrives while the teacher is silent."""

    reason = "SIGTERM"

    def __init__(self, teacher: BrokenTeacher) -> None:
        self.teacher = teacher

    def check(self) -> None:
        if self.teacher.num_asked > BEFORE:
            raise KeyboardInterrupt


def fails_after(number: int, error: Exception) -> Callable[[], None]:
    """Return a function that raises from its call `number` + 1 on."""
    left = [number]

    def call() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise error

    return call


def broken_advantages() -> Any:
    good = credits_of(Advantage.grpo, RewardConfig())
    count = fails_after(BEFORE, OwnFunctionError("algorithm.advantage=a:f: it returned None"))

    def estimate(groups, rewards):
        count()
        return good(groups, rewards)

    return estimate


class BrokenLoss(FakeWorkers):
    """Workers in which the user's loss fails."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.fail = fails_after(BEFORE, OwnFunctionError("algorithm.loss=a:f: ValueError"))

    def update(self, batch) -> Metrics:
        self.fail()
        return super().update(batch)


def own_on_step() -> Any:
    count = fails_after(BEFORE + 1, KeyError("mine"))  # it is also called for step 0
    return lambda _step, _row: count()


@pytest.mark.parametrize(
    ("broken", "error", "last"),
    [
        ({"scorer": BrokenReward(12)}, RewardError, None),
        ({"scorer": BrokenReward(40)}, RewardError, None),
        ({"advantages": broken_advantages()}, OwnFunctionError, BEFORE),
        ({"teacher": BrokenTeacher(RunError("the teacher failed"))}, RunError, BEFORE),
        ({"workers_type": BrokenLoss}, OwnFunctionError, BEFORE + 1),
        ({"new_sampler": lambda n, _: BrokenSampler(n, 0)}, DataError, None),
        ({"on_step": own_on_step()}, KeyError, BEFORE + 1),
    ],
)
def test_an_error_in_a_step_loses_nothing(
    tmp_path: Path, capsys, broken: dict[str, Any], error: type[Exception], last: int | None
) -> None:
    """The mended run then trains every step once. Fails when steps, groups or tokens since the last
    checkpoint are lost, or trained twice.
    """
    config = settings(num_steps=NUM_STEPS)
    with pytest.raises(error):
        run(config, tmp_path, **broken)
    assert "continue with resume=auto" in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "samples" / "leftover.jsonl").exists()
    resumed = load("auto", tmp_path)
    assert resumed is not None
    assert resumed.manifest.step == (last or resumed.manifest.step)
    sampler = broken.get("new_sampler") and (lambda n, _: Mended(n, 0))
    run(config, tmp_path, resumed=resumed, new_sampler=sampler)
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == list(range(NUM_STEPS + 1))
    assert [row["ledger/trained"] for row in rows[1:]] == [2 * n for n in range(1, NUM_STEPS + 1)]
    assert [row["loss/bad_step"] for row in rows[1:]].count(1) == ("workers_type" in broken)


def test_groups_whose_filter_failed_are_judged_after_a_resume(tmp_path: Path, monkeypatch) -> None:
    """Fails when a resumed run waits forever for scores that it has."""
    own = AlgorithmConfig(group_filter="own_filters:keep_after_errors")
    config = replace(settings(num_steps=NUM_STEPS), algorithm=own)
    monkeypatch.setattr(own_filters, "num_good", 5)
    with pytest.raises(OwnFunctionError, match=r"group_filter=own_filters.*ValueError: not yet"):
        run(config, tmp_path)
    assert num_unjudged(tmp_path) > 0
    monkeypatch.setattr(own_filters, "num_good", 10_000)
    run(config, tmp_path, resumed=load("auto", tmp_path))
    assert num_unjudged(tmp_path) == 0
    assert rows_of(tmp_path)[-1]["ledger/trained"] == 2 * NUM_STEPS


def test_a_run_without_signal_may_try_as_often_again_after_a_resume(
    tmp_path: Path, monkeypatch
) -> None:
    """Fails when the groups that were rejected before count against the mended filter."""
    own = AlgorithmConfig(group_filter="own_filters:reject_all_but")
    config = replace(settings(num_steps=NUM_STEPS), algorithm=own)
    monkeypatch.setattr(own_filters, "num_good", 6)
    with pytest.raises(RunError, match=r"rejected by algorithm\.group_filter=own_filters:reject"):
        run(config, tmp_path)
    monkeypatch.setattr(own_filters, "num_good", 10_000)
    run(config, tmp_path, resumed=load("auto", tmp_path))
    assert rows_of(tmp_path)[-1]["step"] == NUM_STEPS


def num_unjudged(run_dir: Path) -> int:
    """Return the number of groups in the last checkpoint that have all scores and are open."""
    saved = load("auto", run_dir)
    assert saved is not None
    return sum(len(group["scores"]) == 2 for group in saved.state["collector"]["buffer"]["open"])


class Mended(Shuffled):
    """The sampler without its error, under the name that the checkpoint has."""


Mended.__name__ = "BrokenSampler"


def test_a_silent_teacher_can_be_interrupted_and_its_groups_are_trained_later(
    tmp_path: Path,
) -> None:
    """Fails when the groups of the step that waits are lost, or the signal is not seen."""
    teacher = BrokenTeacher(None)
    config = replace(settings(num_steps=NUM_STEPS), deterministic=True)
    run(config, tmp_path, teacher=teacher, interrupts=LateInterrupt(teacher))
    resumed = load("auto", tmp_path)
    assert resumed is not None
    assert resumed.manifest.step == BEFORE
    run(config, tmp_path, resumed=resumed)
    whole = tmp_path / "whole"
    run(config, whole)
    for key in ("step", "reward/mean", "ledger/opened", "ledger/trained", "staleness/age_mean"):
        assert [row.get(key) for row in rows_of(tmp_path)] == [
            row.get(key) for row in rows_of(whole)
        ], key


def test_after_a_lost_worker_nothing_is_saved(tmp_path: Path, monkeypatch) -> None:
    """Workers that are gone cannot write. Fails when the run waits for them, or hides the cause."""

    def die(workers: FakeWorkers, _batch: object) -> Metrics:
        workers.has_failed = True
        raise WorkerDiedError("worker 0 died")

    monkeypatch.setattr(FakeWorkers, "update", die)
    with pytest.raises(WorkerDiedError):
        run(settings(num_steps=2), tmp_path)
    assert load("auto", tmp_path) is None
