"""Agents that talk to the policy through the openai package, in their real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import agent_programs
import httpx
import pytest
from agent_episodes import agents, encode, play, question, say, tokenizer
from episodes import answer
from own_process import is_running, wait_until

from april_rl.config.environment import EnvironmentConfig
from april_rl.config.runtime import UserCodeConfig
from april_rl.config.task import DataConfig
from april_rl.errors import DataError
from april_rl.task.data.prompts import load_prompts
from april_rl.task.environments.loading import describe
from april_rl.task.environments.protocol import EnvironmentFailedError

COMMAND = f"{sys.executable} {agent_programs.__file__}"


def test_the_conversation_is_trained_as_it_was_sampled(usual_agents):
    sample, reply = play(usual_agents, question("talk hello"), "one", "three")
    messages = [
        *({"role": "user", "content": "hello"}, {"role": "assistant", "content": "one"}),
        *({"role": "user", "content": "more"}, {"role": "assistant", "content": "three"}),
    ]
    whole = tokenizer().chat_text(messages, begins_turn=False)
    assert tuple(sample.sequence) == encode(whole)[: len(sample.sequence)]
    assert len(encode(whole)) - len(sample.sequence) <= 1, "what a template writes after a turn"
    assert [len(each.token_ids) for each in sample.completions] == [4, 6]
    assert (reply.is_final, reply.reward) == (True, 8.0)


ENDS = {
    "stream": 4.3,  # tokens, plus a tenth for each character
    "twice": 33.0,
    "huge": 4.0,
    "models": 1.0,
    "examples": 3.0,
    "odd": 8.0,
    'wish {"temperature": 0.1, "max_tokens": 5, "n": 1}': 1.0,
    'wish {"n": 2}': 3.0,
    'wish {"tool_choice": "required"}': 1.0,
    'wish {"tool_choice": {"type": "function", "function": {"name": "f"}}}': 1.0,
    'wish {"response_format": {"type": "json_schema", "json_schema": {"name": "f"}}}': 1.0,
    'stopped {"stop": ["c", "x"]}': 2.0,
    'stopped {"stop": "a"}': 0.0,
    'wish {"max_tokens": 0}': 3.0,
    'wish {"logprobs": true, "top_logprobs": 2}': 3.0,
    'refused {"logprobs": 2}': 1.0,
    'refused {"best_of": 2}': 1.0,
    'refused {"prompt": ["a", "b"]}': 1.0,
    'refused {"prompt": [[1, 2]]}': 1.0,
    "likely": -2.0,
    'wish {"stop": 5}': 3.0,
    'wish {"tools": ["a"]}': 3.0,
    'wish {"extra_body": {"guided": 1}}': 3.0,
}


@pytest.mark.parametrize("text", ENDS)
def test_an_unchanged_client_gets_what_it_expects_or_a_clear_error(usual_agents, text):
    _, reply = play(usual_agents, question(text), "abc", "abc")
    assert not reply.failure
    assert reply.is_final
    assert reply.reward == pytest.approx(ENDS[text])


@pytest.mark.parametrize(
    ("text", "wait_s"), [("retry", 1.0), ("abandoned", 0.5), ("abandoned", 1.5)]
)
def test_a_client_that_times_out_asks_again_and_gets_the_same_answer(usual_agents, text, wait_s):
    """The sample may be parked during weight syncs, while its client gives up after 0.3 s each
    time. Fails when the request counts twice, or an answer that no one has read is lost.
    """
    sample = question(text)
    sample = sample.with_span(answer(usual_agents, sample))
    time.sleep(wait_s)
    reply = answer(usual_agents, say(sample, "abc"))
    assert (reply.is_final, reply.reward) == (True, 3.0)


def test_an_identical_new_request_gets_another_answer(usual_agents):
    """Agents that sample several times, or retry after an unreadable answer, need this."""
    sample, reply = play(usual_agents, question("again"), "one", "two", "three")
    assert (reply.is_final, reply.reward, len(sample.context_lengths)) == (True, 3.0, 3)


FAILURES = {
    "broken": "KeyError: 'a column is missing'",
    "leave": "the agent raised SystemExit(3)",
    "silent": "ended before its first request to the policy",
    "hang": "no answer within environment.step_timeout_s",
    "fail": "a tool is missing",
    "words": "returned 'much', expected a number",
}


@pytest.fixture(scope="module")
def impatient_agents(tmp_path_factory):
    with agents(tmp_path_factory.mktemp("agents"), step_timeout_s=2.0) as pool:
        yield pool


@pytest.mark.parametrize("text", FAILURES)
def test_an_agent_that_fails_gives_a_reason_and_no_reward(impatient_agents, text):
    _, reply = play(impatient_agents, question(text), "abc")
    impatient_agents.forget(question(text).id)
    assert FAILURES[text] in reply.failure
    assert reply.reward == 0.0


def test_a_fault_after_the_last_turn_gives_no_reward(tmp_path):
    with agents(tmp_path, max_turns=1) as pool:
        _, reply = play(pool, question("scoring"), "abc")
    assert "a bug behind the last turn" in reply.failure


def test_an_agent_that_never_ends_gets_an_error_when_its_budget_is_used_up(tmp_path):
    with agents(tmp_path, max_turns=3) as pool:
        sample, reply = play(pool, question("loop"), *"abcdef")
    assert len(sample.completions) == 3
    assert (reply.is_final, reply.reward, reply.failure) == (True, 0.0, "")


def test_requests_that_wait_when_the_budget_is_used_up_are_refused(tmp_path):
    with agents(tmp_path, max_turns=1) as pool:
        sample, reply = play(pool, question("late"), "abc", "abc")
    assert (len(sample.completions), reply.reward, reply.failure) == (1, 2.0, "")


def test_a_tool_with_a_side_effect_is_called_once_by_an_agent_that_is_rebuilt(tmp_path):
    notes = tmp_path / "notes"
    asked = question("x", reference=str(notes))
    with agents(tmp_path, function="agent_programs:count_call") as pool:
        sample, _ = play(pool, asked, "one")
    with agents(tmp_path, function="agent_programs:count_call") as pool:
        sample, reply = play(pool, sample, "two")
    assert (reply.is_final, reply.reward, reply.failure) == (True, 2.0, "")
    assert len(notes.read_text().splitlines()) == 2


def test_an_agent_that_is_not_repeatable_is_named_with_the_remedies(tmp_path):
    asked = question("x", reference=str(tmp_path / "note"))
    with agents(tmp_path, function="agent_programs:shorter_again") as pool:
        sample, _ = play(pool, asked, "one", "two")
    with agents(tmp_path, function="agent_programs:shorter_again") as pool:
        reply = answer(pool, say(sample, "three"))
    assert "the agent (of environment.function or command) is not repeat" in reply.failure
    assert "or set environment.on_restart=again" in reply.failure


def test_tool_calls_are_read_in_the_form_of_the_model(usual_agents):
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    sample, reply = play(usual_agents, question("tool"), call, "it rains")
    text = tokenizer().show_text(sample.sequence)
    assert "The weather of a city." in text, "the tools are told"
    assert "rain in Ulm" in text
    assert (reply.is_final, reply.reward) == (True, 4.0)


def test_tools_of_a_model_that_cannot_call_them_are_refused(tmp_path):
    with agents(tmp_path, has_tools=False) as pool:
        _, reply = play(pool, question("tool"))
    assert "this model's tool calls cannot be parsed" in reply.failure


def test_a_program_is_an_agent(tmp_path):
    with agents(tmp_path, command=COMMAND) as pool:
        sample, reply = play(pool, question("hello", reference="123"), "a", "b")
        assert (len(sample.completions), reply.is_final, reply.reward) == (2, True, 3.0)
        _, reply = play(pool, question("complain"), "a", "b")
        assert "ended with exit code 1: it is too hot" in reply.failure
        _, reply = play(pool, question("chat", reference="ten points"), "a", "b")
    assert "the last line must be the reward, got 'ten points'" in reply.failure


def test_a_program_ends_with_its_episode(tmp_path):
    """Fails when an abandoned sample leaves its program waiting."""
    note = tmp_path / "alive"
    script = tmp_path / "agent.py"
    script.write_text(
        "import os, pathlib, openai\n"
        f"pathlib.Path({str(note)!r}).write_text(str(os.getpid()))\n"
        "asked = [dict(role='user', content='a')]\n"
        "openai.OpenAI().chat.completions.create(model='m', messages=asked)\n"
    )
    with agents(tmp_path, command=f"{sys.executable} {script}") as pool:
        sample = question("a")
        answer(pool, sample)
        process = Path("/proc", note.read_text())
        assert process.exists()
        pool.forget(sample.id)
        wait_until(lambda: not is_running(int(process.name)), within_s=20.0)


FIRST_REQUEST = """
import asyncio, os, sys
import agent_programs
from april_rl.task.environments.agent.agent import Agent
from april_rl.task.environments.agent.endpoint import Endpoint
from april_rl.task.environments.agent.programs import of_command, of_function
from april_rl.task.environments.protocol import Context
from april_rl.types import SampleId

command = sys.argv[1]
context = Context(sample_id=SampleId(0, 0), is_replay=False, once=print)
program = (
    of_command(command, context) if command else of_function(agent_programs.run, {}, context)
)
agent = Agent(program, Endpoint("127.0.0.1"), name="a", patience_s=1.0)
opening = asyncio.run(agent.reset({"prompt": "talk hello", "answer": ""}, 0))
print(opening.messages, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("sh -c 'exit 3'", "exit code 3"),
        ("sh -c no-such-program", "not found"),
        (f"{sys.executable} no_such_file.py", "No such file"),
    ],
)
def test_a_command_that_ends_at_once_gives_the_reason(tmp_path, command, reason):
    """Fails when the process ended before it was checked, and that becomes the error."""
    with agents(tmp_path, command=command) as pool:
        for _ in range(3):
            assert reason in answer(pool, question("a")).failure


@pytest.mark.parametrize("command", ["", COMMAND], ids=["function", "command"])
def test_the_proxy_of_the_machine_is_not_used(command):
    proxies = dict.fromkeys(("http_proxy", "HTTP_PROXY", "all_proxy"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-c", FIRST_REQUEST, command],
        env={**os.environ, **proxies, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "hello" in done.stdout, done.stderr


def asked_for(access, scheme="Bearer"):
    """Return the status of a request with the address and key that an agent wrote to a file."""
    url, key = access.read_text().split()
    body = {"messages": [{"role": "user", "content": "b"}], "n": 2}
    headers = {"Authorization": f"{scheme} {key}"}
    return httpx.post(f"{url}chat/completions", json=body, headers=headers).status_code


def test_a_key_ends_with_its_episode(tmp_path):
    """Another episode keeps the server open. The request is malformed, and its key is checked
    first.
    """
    with agents(tmp_path, function="serving_agents:betray") as pool:
        for name in ("first", "other"):
            sample = question("x", reference=str(tmp_path / name))
            sample = say(sample.with_span(answer(pool, sample)), "abc")
            assert {asked_for(tmp_path / name, form) for form in ("Bearer", "bearer")} == {400}
            assert asked_for(tmp_path / name, "Basic") == 401
            if name == "first":
                assert answer(pool, sample).is_final
        wait_until(lambda: asked_for(tmp_path / "first") == 401, within_s=10.0)
        assert asked_for(tmp_path / "other") == 400


def test_an_agent_on_another_machine_is_served_only_at_the_given_address(tmp_path):
    with agents(tmp_path, function="serving_agents:where", address="127.0.0.2") as pool:
        _, reply = play(pool, question("x"), "a")
    assert reply.reward == 1.0


def test_arguments_and_the_seed_of_the_prompt_reach_a_function(tmp_path):
    told = {"function": "agent_programs:told", "args": {"extra": "hello"}}
    with agents(tmp_path, **told) as pool:
        first, second = (play(pool, question("x"), "a") for _ in range(2))
    assert "hello" in tokenizer().show_text(first[0].sequence)
    assert first[1].reward == second[1].reward > 0


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"function": "agent_programs:rewrite"}, "coroutine function in a list of tools"),
        ({"function": "agent_programs:told"}, "missing a required argument: 'extra'"),
        ({"function": "agent_programs:nobody"}, "has no function 'nobody'"),
        (
            {"function": "agent_programs:run", "address": "192.0.2.1"},
            "address=192.0.2.1: cannot listen",
        ),
        (
            {"function": "agent_programs:run", "address": "0.0.0.0"},
            "address=0.0.0.0 is not an address that an agent can reach",
        ),
    ],
)
def test_a_function_that_is_not_an_agent_is_refused_before_training(settings, complaint):
    with pytest.raises(EnvironmentFailedError, match=complaint) as caught:
        describe(EnvironmentConfig(**settings), UserCodeConfig())
    assert str(caught.value).startswith(f"environment.function={settings['function']}: ")


def test_a_system_prompt_is_refused_where_an_agent_writes_the_messages():
    chosen = DataConfig(path="x", environment=True, system_prompt="hello")
    with pytest.raises(DataError, match=r"data.path=x: system_prompt has no effect on an agent"):
        load_prompts(chosen, tokenizer(), key="data.path", max_prompt_tokens=9, has_agent=True)
