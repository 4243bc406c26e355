"""Runs with a teacher and a critic, through the command."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import command, rows_of, run, run_all, write_task
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


@pytest.mark.slow
@pytest.mark.cpu_engine
def test_the_recipe_of_a_teacher_leads_the_policy_to_it(tmp_path: Path) -> None:
    """With one sample a prompt and without a reward that is trained. Fails when nothing is learned,
    or the run complains that groups have no signal.
    """
    words = ("+recipe=tiny_distill_cpu", "trainer.num_steps=8", *SMALL)
    done = run(command(None, tmp_path / "run", *words), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [row for row in rows_of(tmp_path / "run") if "loss/total" in row]
    divergence = [row["loss/teacher_kl"] for row in rows]
    assert len(divergence) == 8
    assert divergence[-1] < 0.8 * divergence[0]
    assert "signal" not in done.stdout


def test_a_teacher_with_another_tokenizer_is_refused_at_the_start(tmp_path: Path) -> None:
    task = write_task(tmp_path)
    words = ("+recipe=tiny_cpu", f"teacher.path={task / 'model'}")
    done = run(command(None, tmp_path / "run", *words), tmp_path)
    assert done.returncode == 1
    assert "has another tokenizer than model.path=" in done.stderr
