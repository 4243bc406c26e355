"""Real runs that are disturbed in every known way, at random moments, lose nothing."""

import subprocess
import sys

import pytest
from command_line import environment, groups_of, steps_of, write_task
from source_tree import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine]


# With seed 1794 the first life loses its worker in a step and, after the restart, its controller.
# The fifty lives meet kills of every kind; tests/checkpointing/test_checkpoint_kills.py kills a
# save at each of its moments.
@pytest.mark.parametrize(
    ("num_kills", "seed"), [(1, 1794), pytest.param(50, 3, marks=pytest.mark.soak)]
)
def test_a_run_that_is_killed_often_loses_no_prompt_and_trains_none_twice(
    tmp_path, num_kills, seed
):
    """The reward counts its calls. Fails when a checkpoint is half written, a step is there twice,
    a prompt is lost or trained twice, a process stays, or the reward counts from 0 after a resume.
    """
    task = write_task(tmp_path)
    args = ["--kills", str(num_kills), "--seed", str(seed), "--output", str(tmp_path / "killed")]
    args += [
        "~evaluation.sets.held_out",  # an own model takes less time than the tiny task's
        f"model.path={task / 'model'}",
        f"data.path={task / 'sums.jsonl'}",
        "data.template=plain",
        "reward.function=reward_functions:CountsCalls",
        "reward.num_processes=1",
        "trainer.num_groups=4",
        "rollout.group_size=4",
        "rollout.max_response_tokens=64",
    ]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "kill_anywhere.py"), *args],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=300 * (num_kills + 1),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count(" s, step ") == num_kills
    assert f"{num_kills} kills, seed {seed}: 0 checks failed" in done.stdout
    assert num_kills > 1 or "worker killed in a step, then the controller" in done.stdout
    run_dir = tmp_path / "killed" / "run"
    rewards = [group[0]["reward"] for group in groups_of(run_dir)]
    assert len(set(rewards)) == len(rewards) == 4 * len(steps_of(run_dir)) > 0
