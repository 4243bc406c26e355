"""Runs with a teacher; tests/runs/test_one_process.py has a run with a teacher and a critic."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import rows_of, run_here

SMALL = ("trainer.num_steps=2", "trainer.num_groups=8", "evaluation.sets.held_out=null")


@pytest.mark.slow
@pytest.mark.cpu_engine
def test_the_recipe_with_a_teacher_trains_without_groups_and_rewards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sample per prompt. Fails when nothing is trained, or the run complains that groups have
    no signal. A test of the learner shows that updates lead to the teacher: here chance would hide
    it.
    """
    run_here(None, tmp_path / "run", "+recipe=tiny_distill_cpu", *SMALL)
    rows = [row for row in rows_of(tmp_path / "run") if "loss/total" in row]
    assert len(rows) == 2
    assert all(row["loss/teacher_kl"] > 0.05 and row["loss/grad_norm"] > 0 for row in rows)
    assert "signal" not in capsys.readouterr().out
