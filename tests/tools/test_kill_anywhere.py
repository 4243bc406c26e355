"""Real runs that are disturbed in every known way, at random moments, lose nothing."""

import sys

import pytest
from command_line import groups_of, run, steps_of, write_task
from source_tree import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine, pytest.mark.soak]
NUM_KILLS, SEED = 50, 3  # these settings meet kills of every kind


def test_a_run_that_is_killed_often_loses_no_prompt_and_trains_none_twice(tmp_path):
    """The reward counts its calls. Fails when a checkpoint is half written, a step is repeated, a
    prompt is lost or trained twice, a process is left, or the reward counts from 0 after a resume.
    """
    task = write_task(tmp_path)
    args = ["--kills", str(NUM_KILLS), "--seed", str(SEED), "--output", str(tmp_path / "killed")]
    args += [
        "~evaluation.sets.held_out",  # a new model takes less time than the tiny task's
        f"model.path={task / 'model'}",
        f"data.path={task / 'sums.jsonl'}",
        "data.template=plain",
        "reward.function=reward_functions:CountsCalls",
        "reward.num_processes=1",
        "trainer.num_groups=4",
        "rollout.group_size=4",
        "rollout.max_response_tokens=64",
    ]
    program = [sys.executable, str(ROOT / "tools" / "kill_anywhere.py"), *args]
    done = run(program, tmp_path, timeout_s=300 * (NUM_KILLS + 1))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count(" s, step ") == NUM_KILLS
    assert f"{NUM_KILLS} kills, seed {SEED}: 0 checks failed" in done.stdout
    run_dir = tmp_path / "killed" / "run"
    rewards = [group[0]["reward"] for group in groups_of(run_dir)]
    assert len(set(rewards)) == len(rewards) == 4 * len(steps_of(run_dir)) > 0
