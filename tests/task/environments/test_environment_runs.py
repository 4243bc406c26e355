"""Runs whose samples have an environment, started through the command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean

import pytest
from command_line import command, rows_of, run, run_here, run_until_killed, steps_of
from equal_runs import files_of, metrics_of
from two_worker_runs import has_row

from april_rl.run.tracking.keys import KEYS
from april_rl.start.commands import checkpoint

pytestmark = pytest.mark.slow
SMALL = (
    "+recipe=tiny_tools_cpu",
    *("trainer.num_groups=4", "rollout.group_size=4", "environment.args.median_s=0.01"),
)
AGENT = ("+recipe=tiny_agent_cpu", *SMALL[1:-1])


FORGETFUL = """
async def run(client, row, seed):
    asked = [{"role": "user", "content": row["prompt"]}]
    for _ in range(2):
        answer = await client.chat.completions.create(model="policy", messages=asked)
        asked += [answer.choices[0].message, {"role": "user", "content": " a2=2 "}]
    answer = await client.completions.create(model="policy", prompt=row["prompt"], max_tokens=3)
    assert answer.usage.completion_tokens <= 3
    ends = {"max_tokens": 60, "stop": "="}
    await client.completions.create(model="policy", prompt=row["prompt"], **ends)
    answer = await client.chat.completions.create(model="policy", messages=asked[:1])
    return float(len(answer.choices[0].message.content) % 2)
"""


def test_a_run_trains_an_agent_that_restarts_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when a request is lost, the agent's messages are not in the sample, or engine and
    learner read different contexts.
    """
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    monkeypatch.syspath_prepend(tmp_path)
    own = (
        *("environment.function=forgetful:run", "environment.max_turns=5"),
        *("environment.max_observation_tokens=600", "trainer.num_steps=1"),
    )
    run_here(None, tmp_path / "run", *AGENT, *own, "evaluation.sets.held_out=null")
    lines = (tmp_path / "run" / "samples" / "step_00001.jsonl").read_text().splitlines()
    told = [json.loads(line)["conversation"] for line in lines]
    assert all(said[0][0] == "environment" and said[1][0] == "policy" for said in told)
    whole = [said for said in told if len(said) == 10]
    assert whole
    assert all(said[4][1] == said[6][1] == said[8][1] for said in whole), (
        "each starts from the beginning"
    )
    stopped = [said[7][1].strip() for said in whole if "=" in said[7][1]]
    assert stopped
    assert all(text.index("=") == len(text) - 1 for text in stopped)
    rows = [row for row in rows_of(tmp_path / "run") if "mismatch/logprob_abs_mean" in row]
    assert all(row["mismatch/logprob_abs_mean"] < 1e-5 for row in rows)
    assert 2 < rows[0]["environment/contexts_mean"] <= 4
    assert all(row["environment/errors"] == 0 for row in steps_of(tmp_path / "run"))


def test_a_run_shows_the_turns_of_its_samples(tmp_path: Path, capsys) -> None:
    """Fails when the replies of an environment are not shown, or when advantages of turns do not
    reach the update.
    """
    few = ("trainer.num_steps=2", "evaluation.sets.held_out.max_prompts=4")
    run_here(None, tmp_path / "run", *SMALL, *few, "algorithm.advantage=grpo_by_turn")
    lines = (tmp_path / "run" / "samples" / "step_00001.jsonl").read_text().splitlines()
    told = [json.loads(line)["conversation"] for line in lines]
    by_turns = [[who for who, _ in said] for said in told]
    assert ["policy"] in by_turns
    assert ["policy", "environment", "policy"] in by_turns
    said = next(said for said in told if len(said) == 3)
    assert said[1][1].count("=") >= 1, "the partial sums"
    rows = steps_of(tmp_path / "run")
    described = {key.key for key in KEYS if key.stage == "environment"}
    returned = {key for row in rows for key in row}  # some appear only when an environment replies
    assert described <= returned, "a stage no longer returns what a panel shows"
    assert 1 < fmean(row["environment/turns_mean"] for row in rows) < 2
    assert all(0 <= row.get("environment/empty_slots_frac", 0) < 1 for row in rows)
    assert all(row["environment/errors"] == 0 for row in rows)
    folder = tmp_path / "run" / "checkpoints" / "step_2"
    assert checkpoint.main(["show", str(folder)]) == 0
    assert "response tokens" in capsys.readouterr().out
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<dt>policy</dt>" in page
    assert "<dt>environment</dt>" in page


@pytest.mark.soak
@pytest.mark.parametrize("small", [SMALL, AGENT], ids=["tools", "agent"])
def test_a_killed_run_equals_an_uninterrupted_one(tmp_path: Path, small: tuple[str, ...]) -> None:
    """Its episodes are rebuilt from their turns; everything that it samples and trains
    is the same.
    """
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
    # A call made before the kill is not repeated.
    made = [sum(row.pop("environment/calls", 0) for row in each) for each in (rows, again)]
    assert made[1] <= made[0]
    assert rows == again
    assert files_of(whole) == files_of(killed)


TYPED = """
from openai import AsyncOpenAI
from pydantic import BaseModel, ValidationError


class Sum(BaseModel):
    steps: str
    total: int


async def run(client: AsyncOpenAI, row, seed):
    asked = [{"role": "user", "content": row["prompt"]}]
    try:
        answer = await client.chat.completions.parse(
            model="policy", messages=asked, response_format=Sum
        )
    except ValidationError as error:
        return 0.01 * (seed % 7) + 0.001 * (len(str(error)) % 9)
    return float(answer.choices[0].message.parsed.total == int(row["answer"]))
"""


@pytest.mark.soak
def test_a_run_trains_an_agent_with_typed_answers(tmp_path: Path) -> None:
    """Fails when `response_format` is refused, which such an agent always sends. The policy is not
    forced to follow it: other answers fail where the agent reads them.
    """
    (tmp_path / "typed.py").write_text(TYPED)
    few = ("trainer.num_steps=2", "evaluation.sets.held_out.max_prompts=4")
    done = run(
        command(None, tmp_path / "run", *AGENT, "environment.function=typed:run", *few), tmp_path
    )
    assert done.returncode == 0, done.stderr
    rows = steps_of(tmp_path / "run")
    assert len(rows) == 2
    assert all(row["environment/errors"] == 0 < row["loss/grad_norm"] for row in rows)


@pytest.mark.soak
@pytest.mark.parametrize(
    "words", [("rehearse", "accept=one_update"), ("evaluate", "evaluation.max_prompts=4")]
)
def test_commands_take_a_recipe_with_an_environment(words: tuple[str, ...], tmp_path: Path) -> None:
    """Fails when a command uses only the reward where an environment has to reply."""
    done = run([sys.executable, "-m", "april_rl", words[0], *SMALL[:1], *words[1:]], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
