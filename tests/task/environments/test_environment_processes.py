"""Processes of environments: what they receive, what they may use, and what they leave behind."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import sys
import time
from pathlib import Path

import pytest
from agent_episodes import agents, play, question
from episodes import answer, fresh, hear, pool, say, text_of
from own_process import in_own_process, is_running, wait_until

from april_rl.task.environments import pool as pool_module
from april_rl.task.environments import threads as threads_module
from april_rl.task.environments.threads import Threads, time_limit

SECRETS = ("HF_TOKEN", "TOOL_KEY", "PLACE")


def _limited_process(notes: Path) -> str:
    """In a process with secrets and few files, of which the server of processes keeps a copy: start
    an environment that notes its variables, and one that counts its files. Return their number and
    how many are allowed.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    os.environ.update(dict.fromkeys(SECRETS, "1234"))
    with pool("Variables", limits={"secrets": ["TOOL_KEY"]}) as environments:
        answer(environments, say(hear(environments, fresh(notes=notes)), "a"))
    with pool("Plain") as environments:
        observation = answer(environments, say(hear(environments, fresh()), "files"))
    return f"{text_of(observation)} {min(hard, 65536)}"


@pytest.fixture(scope="module")
def limited_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    notes = tmp_path_factory.mktemp("process") / "notes"
    return notes, in_own_process(_limited_process, notes)


@pytest.mark.slow
def test_secrets_of_the_machine_reach_an_environment_only_through_a_setting(limited_process):
    """Neither its process nor the programs that it starts get them otherwise."""
    notes, _ = limited_process
    for line in notes.read_text().splitlines():
        seen = json.loads(line)
        assert "HF_TOKEN" not in seen
        assert (seen["TOOL_KEY"], seen["PLACE"]) == ("1234", "1234")


def test_a_call_that_waits_for_others_gets_its_full_time(monkeypatch):
    """Ten calls of 0.2 s in two threads, with a limit of 0.5 s each."""
    monkeypatch.setattr(threads_module, "_MOST_CALLS", 2)

    async def all_called():
        threads = Threads()

        async def call():
            async with time_limit(0.5):
                return await threads.call(time.sleep, 0.2)

        return await asyncio.gather(*(call() for _ in range(10)))

    assert asyncio.run(all_called()) == [None] * 10


def test_calls_that_hang_do_not_block_others(monkeypatch):
    monkeypatch.setattr(threads_module, "_MOST_CALLS", 1)

    async def called():
        threads = Threads()
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with time_limit(0.05):
                    await threads.call(time.sleep, 1.0)
        assert threads.num_hung == 2
        assert await threads.call(max, 1, 2) == 2
        await asyncio.sleep(1.1)
        return threads.num_hung

    assert asyncio.run(called()) == 0


def test_a_process_with_many_hung_calls_is_replaced(monkeypatch):
    """Its other episodes are rebuilt when their next turn ends."""
    monkeypatch.setattr(pool_module, "MAX_HUNG", 2)
    with pool("Plain", step_timeout_s=0.5) as environments:
        hung, slow, other = (hear(environments, fresh(n)) for n in range(3))
        other = say(other, "a")
        first = answer(environments, other)
        assert "no answer within" in answer(environments, say(hung, "sleep 600000")).failure
        second = answer(environments, say(other.with_span(first), "b"))
        # The process id differs when the episode is rebuilt.
        assert "built again" in second.failure
        assert not answer(environments, say(slow, "a")).failure
        metrics = environments.metrics()
        assert metrics["environment/deaths"].read() == 1


@pytest.mark.parametrize(
    ("turn", "message"), [("next", "StopIteration"), ("close", "GeneratorExit: closed")]
)
def test_every_exception_of_a_thread_is_reported_at_once_with_its_line(turn, message):
    with pool("Plain", step_timeout_s=600.0) as environments:
        failure = answer(environments, say(hear(environments, fresh()), turn)).failure
    assert message in failure
    assert "environment_classes.py:" in failure


@pytest.mark.slow
def test_as_many_files_as_the_system_allows_may_be_open(limited_process):
    theirs, allowed = limited_process[1].split()
    assert theirs == allowed


LEAVES_ONE_BEHIND = """
import os, pathlib, subprocess, sys, openai
note, new_session, end = sys.argv[1:]
def ask():
    asked = [dict(role='user', content='a')]
    openai.OpenAI().chat.completions.create(model='m', messages=asked)
ask()
left = subprocess.Popen(['sleep', '600'], start_new_session=new_session == 'True')
pathlib.Path(note).write_text(str(left.pid))
if end == 'ask':
    ask()
print(5)
"""


@pytest.mark.parametrize("new_session", [False, True])
@pytest.mark.parametrize("end", ["return", "ask", "die"])
def test_a_command_leaves_nothing_behind(new_session, end, tmp_path):
    """Its reward counts although a child still has its output open. What it started ends with the
    command, with its episode and with its process.
    """
    script, note = tmp_path / "agent.py", tmp_path / "left"
    script.write_text(LEAVES_ONE_BEHIND)
    command = f"{sys.executable} {script} {note} {new_session} {end.replace('die', 'ask')}"
    with agents(tmp_path, command=command, step_timeout_s=100.0) as environments:
        sample, reply = play(environments, question("a"), "one")
        assert reply.is_final == (end == "return")
        assert reply.reward == (5.0 if end == "return" else 0.0)
        left = int(note.read_text())
        if end == "ask":
            assert is_running(left)
            environments.forget(sample.id)
        if end == "die":
            environments._processes[0].kill()
        wait_until(lambda: not is_running(left), within_s=20.0)


NODE = """
const fill = new WebAssembly.Memory({initial: 1, maximum: 65536});
fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, {
  method: 'POST',
  headers: {Authorization: `Bearer ${process.env.OPENAI_API_KEY}`},
  body: JSON.stringify({model: 'm', messages: [{role: 'user', content: 'a'}]}),
}).then((answer) => answer.json()).then((answer) => {
  console.log(answer.choices[0].message.content.length + fill.buffer.byteLength / 65536)
})
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_a_program_of_node_runs_within_the_usual_memory(tmp_path):
    (tmp_path / "agent.js").write_text(NODE)
    command = f"node {tmp_path / 'agent.js'}"
    with agents(tmp_path, command=command, limits={"memory_gib": 1}) as environments:
        _, reply = play(environments, question("a"), "four")
    assert (reply.failure, reply.reward) == ("", 5.0)


def test_a_command_without_enough_memory_names_the_setting(tmp_path):
    script = tmp_path / "agent.py"
    script.write_text("bytearray(2 << 30)")
    command = f"{sys.executable} {script}"
    with agents(tmp_path, command=command, limits={"memory_gib": 1}) as environments:
        _, reply = play(environments, question("a"))
    assert "MemoryError; the command and each program that it starts may use" in (reply.failure)
