"""A reward with a state, in a real run and its resume."""

from __future__ import annotations

import json

import pytest
from command_line import command, run, write_task

from april_rl.checkpointing.resume import load

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine]


def test_a_reward_object_is_loaded_once_a_run_and_continues_after_a_resume(tmp_path):
    """Fails when a checkpoint lacks the state, or a resume begins a new one."""
    task, run_dir = write_task(tmp_path / "task"), tmp_path / "run"
    nums_of_calls = []
    for num_steps in (1, 2):
        changes = ("reward.function=reward_functions:Counter", "resume=auto", "evaluation.every=9")
        done = run(command(task, run_dir, *changes, f"trainer.num_steps={num_steps}"), tmp_path)
        assert done.returncode == 0, done.stderr
        saved = load("auto", run_dir)
        state = json.loads(saved.state["rewards"]["reward_functions:Counter"])
        nums_of_calls.append(state["num_calls"])
    num_groups = 4  # of a step
    assert nums_of_calls[0] >= num_groups
    assert nums_of_calls[1] >= nums_of_calls[0] + num_groups
    assert (run_dir / "loaded").read_text().count("\n") == 2
