"""A run in one process (runtime.ray=false), for a debugger or a notebook."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command_line import command, rows_of, run_all, write_task
from composed_config import load, refusal
from equal_runs import SETTINGS, check_equal

from april_rl.planning.layout import settle


@pytest.mark.slow
@pytest.mark.cpu_engine
def test_a_run_in_one_process_equals_the_run_with_ray(tmp_path: Path) -> None:
    """To the last bit, with partial rollouts. Fails when the two do not take the same way."""
    task = write_task(tmp_path)
    runs = {name: command(task, tmp_path / name, *SETTINGS) for name in ("with_ray", "alone")}
    for done in run_all([runs["with_ray"], [*runs["alone"], "runtime.ray=false"]], tmp_path):
        assert done.returncode == 0, done.stderr[-3000:]
    check_equal(tmp_path / "with_ray", tmp_path / "alone")


# A user debugs a loss like this, except that the breakpoint takes a note instead of asking.
DEBUGGED = """
import sys
import ray
from april_rl.algorithm import losses
from april_rl.api import train

stops = []
sys.breakpointhook = lambda: stops.append(sys._getframe(1).f_locals["inputs"])
loss = losses.ppo_clip

def debugged(inputs, **bounds):
    breakpoint()
    return loss(inputs, **bounds)

if __name__ == "__main__":
    losses.ppo_clip = debugged
    for number in (1, 2):
        train("tiny_cpu", "runtime.ray=false", "trainer.num_steps=1", "trainer.num_groups=2",
              "rollout.group_size=2", "evaluation.sets.held_out=null", run_dir=f"run_{number}")
        assert stops and stops.pop().logprobs.requires_grad
        stops.clear()
    assert not ray.is_initialized()
"""


@pytest.mark.slow
@pytest.mark.cpu_engine
def test_a_breakpoint_in_a_loss_is_reached_and_a_second_run_follows_in_the_process(
    tmp_path: Path,
) -> None:
    """Fails when the loss is computed elsewhere, or a run leaves something that stops the next."""
    script = tmp_path / "script.py"
    script.write_text(DEBUGGED)
    [done] = run_all([[sys.executable, str(script)]], tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert [rows_of(tmp_path / f"run_{run}")[-1]["step"] for run in (1, 2)] == [1, 1]


@pytest.mark.parametrize(
    "more", ["runtime.num_workers=2", "runtime.ray_address=auto"], ids=["workers", "address"]
)
def test_one_process_has_one_worker(more: str) -> None:
    message = refusal("+recipe=tiny_cpu", "runtime.ray=false", more)
    assert "runtime.ray=false runs one worker in the process that was started" in message


def test_auto_is_one_worker_in_one_process() -> None:
    config = load("+recipe=tiny_cpu", "runtime.ray=false", "runtime.num_workers=auto")
    _, layout = settle(config, gpus=8, where="this machine")
    assert layout.num_workers == 1
