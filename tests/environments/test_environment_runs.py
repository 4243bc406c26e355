"""Runs whose samples have an environment, through the command."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from command_line import command, rows_of, run, run_until_killed
from equal_runs import files_of, metrics_of
from two_worker_runs import has_row

from april_rl.commands import checkpoint
from april_rl.tracking.keys import KEYS

pytestmark = pytest.mark.slow
SMALL = (
    *("+recipe=tiny_tools_cpu", "tracking.wandb=disabled", "runtime.threads=1"),
    *("trainer.num_groups=4", "rollout.group_size=4", "environment.args.median_s=0.01"),
)
AGENT = ("+recipe=tiny_agent_cpu", *SMALL[1:-1])


def test_a_run_trains_an_agent_as_it_is(tmp_path: Path) -> None:
    """Fails when a request is lost, or what the agent says is not in the sample."""
    few = ("trainer.num_steps=2", "evaluation.sets.held_out.max_prompts=4")
    done = run(command(None, tmp_path / "run", *AGENT, *few), tmp_path)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / "samples" / "step_00001.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    told = [[who for who, _ in sample["conversation"]] for sample in samples]
    assert ["environment", "policy"] in told
    assert ["environment", "policy", "environment", "policy"] in told
    assert all(sample["prompt"] == sample["conversation"][0][1] for sample in samples)
    last = rows_of(tmp_path / "run")[-1]
    assert last["environment/errors"] == 0
    first = next(row for row in rows_of(tmp_path / "run") if "mismatch/logprob_abs_mean" in row)
    assert first["mismatch/logprob_abs_mean"] < 1e-3


def test_a_run_shows_the_turns_of_its_samples(tmp_path: Path, capsys) -> None:
    """Fails when an environment is asked, but nobody sees what it said, or when advantages of turns
    do not reach the update.
    """
    few = ("trainer.num_steps=2", "evaluation.sets.held_out.max_prompts=4")
    small = (*SMALL, *few, "algorithm.advantage=grpo_by_turn")
    done = run(command(None, tmp_path / "run", *small), tmp_path)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / "samples" / "step_00001.jsonl").read_text().splitlines()
    told = [json.loads(line)["conversation"] for line in lines]
    by_turns = [[who for who, _ in said] for said in told]
    assert ["policy"] in by_turns
    assert ["policy", "environment", "policy"] in by_turns
    said = next(said for said in told if len(said) == 3)
    assert said[1][1].count("=") >= 1, "the partial sums"
    last = rows_of(tmp_path / "run")[-1]
    described = {key.key for key in KEYS if key.stage == "environment"}
    assert described <= last.keys(), "a stage no longer returns what a panel shows"
    assert 1 < last["environment/turns_mean"] < 2
    assert 0 <= last["environment/empty_slots_frac"] < 1
    assert last["environment/errors"] == 0
    folder = tmp_path / "run" / "checkpoints" / "step_2"
    assert checkpoint.main(["show", str(folder)]) == 0
    assert "response tokens" in capsys.readouterr().out
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<dt>policy</dt>" in page
    assert "<dt>environment</dt>" in page


@pytest.mark.soak
@pytest.mark.parametrize("small", [SMALL, AGENT], ids=["tools", "agent"])
def test_a_killed_run_equals_an_uninterrupted_one(tmp_path: Path, small: tuple[str, ...]) -> None:
    """Its episodes are built again by their turns; nothing that it says or trains differs."""
    exact = (
        *(*small, "deterministic=true", "trainer.num_steps=8", "evaluation.every=4"),
        *("checkpoint.every_steps=1", "tracking.save_samples_every=1"),
    )
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = run(command(None, whole, *exact), tmp_path)
    assert done.returncode == 0, done.stderr
    run_until_killed(command(None, killed, *exact), tmp_path, lambda: has_row(killed, step=4))
    done = run(command(None, killed, *exact, f"resume={killed}"), tmp_path)
    assert done.returncode == 0, done.stderr
    again = metrics_of(killed)
    assert sum(row.pop("environment/replays", 0) for row in again) > 0
    rows = metrics_of(whole)
    assert sum(row.pop("environment/replays", 0) for row in rows) == 0
    # A call that was made before the kill is not made again.
    made = [sum(row.pop("environment/calls", 0) for row in each) for each in (rows, again)]
    assert made[1] <= made[0]
    assert rows == again
    assert files_of(whole) == files_of(killed)


@pytest.mark.soak
@pytest.mark.parametrize("words", [("rehearse",), ("evaluate", "evaluation.max_prompts=4")])
def test_commands_take_a_recipe_with_an_environment(words: tuple[str, ...], tmp_path: Path) -> None:
    """Fails when a command asks the reward alone what an environment must answer."""
    done = run([sys.executable, "-m", "april_rl", words[0], *SMALL[:1], *words[1:]], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
