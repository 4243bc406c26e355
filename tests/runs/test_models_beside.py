"""Runs with a teacher and a critic, through the command."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import command, groups_of, rows_of, run, run_all, write_task
from equal_runs import SETTINGS, metrics_of

BESIDE = (
    "algorithm=ppo",
    "critic.lr=1e-3",
    "critic.warmup_steps=1",
    "teacher.weight=0.5",
    "runtime.ray=false",
)
SMALL = (
    "trainer.num_groups=16",
    "evaluation.sets.held_out=null",
    "runtime.ray=false",
)


@pytest.mark.slow
@pytest.mark.cpu_engine
def test_a_resumed_run_with_a_teacher_and_a_critic_equals_the_undisturbed_one(
    tmp_path: Path,
) -> None:
    """To the last bit, from a checkpoint after the warm-up. Fails when the critic's weights, its
    optimizer state or its warm-up are not restored.
    """
    task = write_task(tmp_path)
    beside = (*BESIDE, f"teacher.path={task / 'model'}", *SETTINGS)
    short = [word for word in beside if not word.startswith("trainer.num_steps=")]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    runs = [
        command(task, whole, *beside),
        command(task, halves, *short, "trainer.num_steps=3"),
    ]
    for done in run_all(runs, tmp_path):
        assert done.returncode == 0, done.stderr[-3000:]
    done = run(command(task, halves, *beside, "resume=auto"), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    steps, again = (
        [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in metrics_of(run_dir)]
        for run_dir in (whole, halves)
    )
    steps = [row for row in steps if "critic/loss" in row]
    assert len(steps) == 5
    assert steps == [row for row in again if "critic/loss" in row]
    weights = Path("exports", "step_5", "model.safetensors")
    assert (whole / weights).read_bytes() == (halves / weights).read_bytes()
    assert ["loss/total" in row for row in steps] == [False, True, True, True, True]
    assert "loss/teacher_kl" in steps[-1]
    trained = [sample for group in groups_of(whole) for sample in group]
    assert {sample["advantage"] for sample in trained} == {None}, "the critic's stay in the worker"


@pytest.mark.slow
@pytest.mark.cpu_engine
def test_the_recipe_of_a_teacher_trains_without_groups_and_rewards(tmp_path: Path) -> None:
    """One sample a prompt. Fails when nothing is trained, or the run complains that groups have no
    signal. That updates lead to the teacher is a test of the learner: here chance is larger.
    """
    words = ("+recipe=tiny_distill_cpu", "trainer.num_steps=4", *SMALL)
    done = run(command(None, tmp_path / "run", *words), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [row for row in rows_of(tmp_path / "run") if "loss/total" in row]
    assert len(rows) == 4
    assert all(row["loss/teacher_kl"] > 0.05 and row["loss/grad_norm"] > 0 for row in rows)
    assert "signal" not in done.stdout


def test_a_teacher_with_another_tokenizer_is_refused_at_the_start(tmp_path: Path) -> None:
    task = write_task(tmp_path)
    words = ("+recipe=tiny_cpu", f"teacher.path={task / 'model'}")
    done = run(command(None, tmp_path / "run", *words), tmp_path)
    assert done.returncode == 1
    assert "has another tokenizer than model.path=" in done.stderr
