"""Run the environments and the agent that docs/environments.md shows."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from agent_episodes import agents, play, question
from command_line import rows_of, run_here
from source_tree import ROOT

from april_rl.task.environments.calls import Calls
from april_rl.task.environments.protocol import Context, Environment, StepResult, Turn
from april_rl.types import SampleId

PAGE = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
GUESS, CHECK, AGENT, CLERK = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def make(code: str, name: str, **given: object) -> Environment:
    names = dict(given)
    exec(code, names)
    return names[name]()  # type: ignore[operator]


ON_A_LAPTOP = re.findall(
    r"^python -m april_rl.train (\S+ environment\.\S+.* trainer\.num_steps=.*)$", PAGE, flags=re.M
)


@pytest.mark.slow
@pytest.mark.cpu_engine
@pytest.mark.parametrize("place", [*(pytest.param(n, marks=pytest.mark.soak) for n in (0, 2)), 1])
def test_the_commands_for_a_laptop_train_what_the_page_shows(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class, a class with tools, an agent. Fails when none of its episodes earns a reward."""
    assert len(ON_A_LAPTOP) == 3
    for name, code in (("guess", GUESS), ("check_sums", CHECK), ("my_agent", AGENT)):
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    few = ("trainer.num_steps=1", "trainer.num_groups=4", "evaluation.sets.held_out=null")
    words = [word for word in ON_A_LAPTOP[place].split() if not word.startswith("trainer.num_st")]
    run_here(None, tmp_path / "run", *words, *few)
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [0, 1]
    lines = (tmp_path / "run" / "samples" / "step_00001.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert any(len(sample["conversation"]) > 2 for sample in samples)
    if place > 0:
        assert any(sample["reward"] for sample in samples)


def say(text: str) -> Turn:
    return Turn(text, raw_text=text)


def test_the_first_example_runs_as_its_comments_say() -> None:
    guess = make(GUESS, "Guess")
    assert guess.reset({"answer": "7", "prompt": ""}, seed=0) == "Guess the number."
    answers = [asyncio.run(guess.step(say(text))) for text in ("9", "five", "3", " 7")]  # type: ignore[arg-type]
    assert [result.messages for result in answers[:3]] == ["too high", "a number, please", "no"]
    assert answers[3] == StepResult(reward=1.0, is_final=True)


def test_the_agent_asks_until_it_is_right(tmp_path, monkeypatch) -> None:
    (tmp_path / "my_agent.py").write_text(AGENT)
    monkeypatch.syspath_prepend(tmp_path)
    with agents(tmp_path, function="my_agent:run") as pool:
        sample, reply = play(pool, question("1 to 9", reference="7"), "3", "it is 7")
    assert len(sample.completions) == 2
    assert (reply.is_final, reply.reward) == (True, 1.0)


def test_a_correct_call_of_the_class_with_tools_is_kept() -> None:
    check = make(CHECK, "Check")
    check.reset(answer="7")  # type: ignore[call-arg]
    answers = [check.boxed(value) for value in ("6", "7", "8")]  # type: ignore[attr-defined]
    assert (answers, check.reward) == (["no", "yes", "no"], 1.0)  # type: ignore[attr-defined]


def test_the_tool_of_the_second_example_is_called_once(tmp_path) -> None:
    posted = []

    async def post(url, text, headers):
        posted.append((url, text, headers["Idempotency-Key"]))
        return f"receipt {len(posted)}"

    for is_replay in (False, True):
        calls = Calls(tmp_path / "calls.jsonl")
        clerk = make(CLERK, "Clerk", post=post, StepResult=StepResult, __name__="clerk")
        clerk.load(  # type: ignore[attr-defined]
            Context(sample_id=SampleId(0, 0), is_replay=is_replay, once=calls.once)
        )
        result = asyncio.run(clerk.step(say("hello")))  # type: ignore[arg-type]
        assert result == StepResult("receipt 1", is_final=True)
    assert len(posted) == 1
