"""Steps with a bad loss, gradient or mismatch: they are skipped and recorded, and sometimes end the
run.

The run is the one of test_trainer.py, with updates that fail.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_trainer import run, settings
from trainer_fakes import FakeWorkers, rows_of

from april_rl.config.schema import LearnerConfig
from april_rl.errors import RunError
from april_rl.metrics import Mean, Metrics
from april_rl.run.checkpointing.resume import AUTO, load
from april_rl.training.batch.packing import Batch
from april_rl.training.learner.update_errors import MismatchError, NonFiniteError
from april_rl.training.updates import Updates


def updates_that_raise(monkeypatch, errors: dict[int, RunError]) -> None:
    """Make the updates with these numbers, counted from 1, fail."""
    made = FakeWorkers.update
    number = 0

    def update(workers, batch) -> Metrics:
        nonlocal number
        number += 1
        if number in errors:
            raise errors[number]
        return made(workers, batch)

    monkeypatch.setattr(FakeWorkers, "update", update)


def test_a_step_that_is_not_finite_is_skipped_and_its_groups_are_written(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    """Two in a row, a good one, and two again: none of them ends a run that may skip three. Fails
    when a good step does not reset the count, when the ledger loses the groups, or nothing is
    reported.
    """
    bad = NonFiniteError("the loss is nan")
    updates_that_raise(monkeypatch, {2: bad, 3: bad, 5: bad, 6: bad})
    run(settings(num_steps=7), tmp_path)
    rows = [row for row in rows_of(tmp_path) if row["step"] > 0]
    assert [row["loss/bad_step"] for row in rows] == [0, 1, 1, 0, 1, 1, 0]
    assert [row["ledger/trained"] for row in rows] == [2 * row["step"] for row in rows]
    written = sorted(path.name for path in (tmp_path / "bad_steps").iterdir())
    assert written == [f"step_0000{step}.jsonl" for step in (2, 3, 5, 6)]
    lines = (tmp_path / "bad_steps" / written[0]).read_text().splitlines()
    assert len({json.loads(line)["prompt_id"] for line in lines}) == 2
    assert len(lines) == 4
    printed = " ".join(capsys.readouterr().out.split())
    assert "step 2 is skipped: the loss is nan. Its groups are in" in printed


def test_too_many_consecutive_steps_that_are_not_finite_end_the_run(
    tmp_path: Path, monkeypatch
) -> None:
    updates_that_raise(monkeypatch, {n: NonFiniteError("the loss is inf") for n in (2, 3, 4)})
    with pytest.raises(NonFiniteError, match=r"3 steps in a row .* lower optimizer.lr"):
        run(settings(num_steps=9), tmp_path)
    assert [row["step"] for row in rows_of(tmp_path)] == [0, 1, 2, 3, 4]


def test_the_count_of_steps_that_are_not_finite_continues_after_a_resume(
    tmp_path: Path, monkeypatch
) -> None:
    """Two before and one after. Fails when a run that is resumed again and again may
    skip forever.
    """
    bad = NonFiniteError("the loss is inf")
    with monkeypatch.context() as patch:
        updates_that_raise(patch, {2: bad, 3: bad})
        run(settings(num_steps=3), tmp_path)
    updates_that_raise(monkeypatch, {1: bad})
    with pytest.raises(NonFiniteError, match=r"3 steps in a row"):
        run(settings(num_steps=9), tmp_path, resumed=load(AUTO, tmp_path))


@pytest.mark.parametrize(("bad", "is_cured"), [([2], True), ([2, 5], True), ([2, 3], False)])
def test_a_mismatch_ends_the_run_only_if_another_weight_sync_does_not_help(
    tmp_path: Path, monkeypatch, bad: list[int], is_cured: bool
) -> None:
    """Fails when the first mismatch ends the run, or a later one counts as the same."""
    agrees = Metrics({"mismatch/logprob_abs_mean": Mean(0.001)})
    monkeypatch.setattr(FakeWorkers, "update", lambda *_: agrees)
    updates_that_raise(monkeypatch, {n: MismatchError("they disagree") for n in bad})
    if is_cured:
        run(settings(num_steps=6), tmp_path)
    else:
        with pytest.raises(MismatchError, match="synced again after step 2, which did not help"):
            run(settings(num_steps=6), tmp_path)
    skipped = [row["step"] for row in rows_of(tmp_path) if row.get("loss/bad_step")]
    assert skipped == bad


def test_a_mismatch_whose_next_step_compares_nothing_still_counts(
    tmp_path: Path, monkeypatch
) -> None:
    """A step without fresh tokens shows nothing. Fails when it counts as agreement."""
    updates_that_raise(monkeypatch, {2: MismatchError("they disagree"), 4: MismatchError("still")})
    with pytest.raises(MismatchError, match="did not help"):
        run(settings(num_steps=6), tmp_path)


def test_the_terminal_says_that_the_first_update_compiles(tmp_path):
    config = replace(settings(num_steps=2), learner=LearnerConfig(fused=True))
    updates = Updates(FakeWorkers(None, tmp_path), config, tmp_path, tell=print)
    batch = Batch(minibatches=(), metrics=Metrics({"throughput/trained_tokens": 1.0}))
    assert updates.phase == "compiling the learner and updating"
    updates.make(batch, step=1, records=list)
    assert updates.phase == "update"
