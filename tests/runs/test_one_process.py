"""A run in one process (runtime.ray=false), for a debugger or a notebook."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from command_line import command, groups_of, run, run_here, steps_of, write_task
from composed_config import load, refusal
from equal_runs import SETTINGS, check_equal, copy_as_killed
from wandb_files import check_one_run

from april_rl.start.planning.layout import settle
from april_rl.training.algorithm import losses

BESIDE = (
    *("algorithm=ppo", "critic.lr=1e-3", "critic.warmup_steps=1", "teacher.weight=0.5"),
    *("algorithm.entropy_target=10", "optimizer.schedule=linear", "tracking.wandb=offline"),
    *("checkpoint.every_steps=2", "checkpoint.export_every_steps=2", "checkpoint.keep_last=3"),
)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[losses.LossInputs]]:
    """Return a folder with a whole run with Ray, a copy of it that this process resumed after a
    kill, and the inputs of the loss that a breakpoint saw in this process.
    """
    folder = write_task(tmp_path_factory.mktemp("runs"))
    settings = (*BESIDE, f"teacher.path={folder / 'model'}", *SETTINGS)
    done = run(command(folder, folder / "whole", *settings), folder)
    assert done.returncode == 0, done.stderr[-3000:]
    copy_as_killed(folder / "whole", folder / "resumed")
    stops: list[losses.LossInputs] = []
    loss = losses.ppo_clip

    def debugged(inputs: losses.LossInputs, **bounds: Any) -> losses.TokenLoss:
        breakpoint()
        return loss(inputs, **bounds)

    def note() -> None:
        """Record the inputs instead of opening a prompt."""
        stops.append(sys._getframe(1).f_locals["inputs"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "ppo_clip", debugged)
        patch.setattr(sys, "breakpointhook", note)
        run_here(folder, folder / "resumed", *settings, "resume=auto")
    return folder, stops


@pytest.mark.slow
@pytest.mark.cpu_engine
def test_a_run_resumed_in_one_process_equals_the_whole_run_with_ray(ended) -> None:
    """The runs are bit-identical although every score arrives at another moment, with a teacher,
    and with a critic after its warm-up. Fails when the two runs do different things; when scores
    are used in the order of their arrival; when a checkpoint lacks the critic, its optimizer state
    or its warm-up, the entropy bonus, optimizer state, the schedule, a parked token, a score, the
    position in the prompt stream or the expected length; when rows of metrics are lost, duplicated,
    or sent to another run of W&B.
    """
    whole, resumed = (ended[0] / name for name in ("whole", "resumed"))
    assert list((resumed / "checkpoints").glob("*.partial")) == []
    steps = [row for row in check_equal(whole, resumed, num_exports=3) if "critic/loss" in row]
    assert ["loss/total" in row for row in steps] == [False, True, True, True, True]
    assert "loss/teacher_kl" in steps[-1]
    bonus = [row["loss/entropy_coefficient"] for row in steps[1:]]
    assert bonus == pytest.approx([0.0, 0.005, 0.01, 0.015])
    trained = [sample for group in groups_of(whole) for sample in group]
    assert {sample["advantage"] for sample in trained} == {None}, (
        "the critic's advantages stay in the worker"
    )
    assert check_one_run(resumed, steps_of(resumed), num_folders=2) == [1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.cpu_engine
def test_a_breakpoint_in_a_loss_is_reached(ended) -> None:
    _, stops = ended
    assert stops
    assert all(inputs.logprobs.requires_grad for inputs in stops)
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    "more", ["runtime.num_workers=2", "runtime.ray_address=auto"], ids=["workers", "address"]
)
def test_one_process_has_one_worker(more: str) -> None:
    message = refusal("+recipe=tiny_cpu", "runtime.ray=false", more)
    assert "runtime.ray=false runs one worker in the process that was started" in message


def test_auto_workers_is_one_worker_in_one_process() -> None:
    config = load("+recipe=tiny_cpu", "runtime.ray=false", "runtime.num_workers=auto")
    _, layout = settle(config, gpus=8, where="this machine")
    assert layout.num_workers == 1
