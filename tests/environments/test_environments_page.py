"""The environments of docs/environments.md, run as they are written there."""

from __future__ import annotations

import asyncio
import re

from agent_episodes import agents, play, question
from source_tree import ROOT

from april_rl.environments.calls import Calls
from april_rl.environments.protocol import Context, Environment, StepResult, Turn
from april_rl.types import SampleId

PAGE = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
GUESS, AGENT, CLERK = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def make(code: str, name: str, **given: object) -> Environment:
    names = dict(given)
    exec(code, names)
    return names[name]()  # type: ignore[operator]


def say(text: str) -> Turn:
    return Turn(text, raw_text=text)


def test_the_first_example_plays_as_its_comments_say() -> None:
    guess = make(GUESS, "Guess")
    assert guess.reset({"answer": "7", "prompt": ""}, seed=0) == "Guess the number."
    answers = [asyncio.run(guess.step(say(text))) for text in ("9", "five", "3", " 7")]  # type: ignore[arg-type]
    assert [result.messages for result in answers[:3]] == ["too high", "a number, please", "no"]
    assert answers[3] == StepResult(reward=1.0, is_final=True)


def test_the_agent_asks_until_it_is_right(tmp_path, monkeypatch) -> None:
    (tmp_path / "my_agent.py").write_text(AGENT)
    monkeypatch.syspath_prepend(tmp_path)
    with agents(tmp_path, agent="my_agent:run") as pool:
        sample, reply = play(pool, question("1 to 9", reference="7"), "3", "it is 7")
    assert len(sample.completions) == 2
    assert (reply.is_final, reply.reward) == (True, 1.0)


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
