"""Agents with several simultaneous requests, and agents that are rebuilt."""

from __future__ import annotations

import re
import time

import pytest
from agent_episodes import agents, question, say, tokenizer
from episodes import answer

PARALLEL = "repeating_agents:parallel"


def answer_turns(pool, sample, num_turns):
    """Let the policy repeat the number in each question; return the sample and the last reply."""
    reply = answer(pool, sample)
    for _ in range(num_turns):
        (number,) = re.findall(r"number (\d)", tokenizer().show_text(reply.token_ids))
        sample = say(sample.with_span(reply), f"said {number}")
        reply = answer(pool, sample)
    return sample, reply


def test_simultaneous_requests_are_matched_by_content_after_a_process_died(tmp_path):
    """Fails when an agent that is rebuilt gets answers in the order of its requests."""
    with agents(tmp_path, function=PARALLEL) as pool:
        sample, _ = answer_turns(pool, question("x", reference=str(tmp_path / "note")), 3)
        pool._processes[0].kill()
        sample, reply = answer_turns(pool, sample, 3)
    assert (reply.is_final, reply.reward, reply.failure) == (True, 6.0, "")


@pytest.mark.slow
def test_a_rebuilt_agent_that_asks_something_else_fails(tmp_path):
    asked = question("x", reference=str(tmp_path / "note"))
    with agents(tmp_path, function="repeating_agents:odd", step_timeout_s=6.0) as pool:
        sample = say(asked.with_span(answer(pool, asked)), "abc")
        pool._processes[0].kill()
        reply = answer(pool, sample)
    assert "it returned something else when it was built again, after turn 0" in reply.failure


def test_nothing_is_sampled_for_a_client_that_has_left(tmp_path):
    with agents(tmp_path, function="repeating_agents:impatient") as pool:
        sample = question("x")
        sample = sample.with_span(answer(pool, sample))
        time.sleep(1.0)  # the other request arrives and leaves in the meantime
        sample = say(sample, "abc")
        sample = sample.with_span(answer(pool, sample))
        reply = answer(pool, say(sample, "abcd"))
    assert "given up" not in tokenizer().show_text(sample.sequence)
    assert (reply.is_final, reply.reward, reply.failure) == (True, 4.0, "")
