"""A teacher on a server with OpenAI's API, on the loopback interface."""

import json
import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from judge_server import MODEL, serving
from light_samples import PROMPT, completion, whole_sample

from april_rl.config.models_beside import TeacherConfig
from april_rl.errors import RunError
from april_rl.task import teacher_server
from april_rl.task.teacher_server import TeacherServer
from april_rl.types import Group, Observation, Sample, ScoredGroup


def echo(request: dict, **changes: object) -> tuple[int, str]:
    """Return the reply to a request: a token has the text <id> and the log-probability -id -
    position / 100 nats.
    """
    ids = request["prompt"]
    values = [None, *(-each - place / 100 for place, each in enumerate(ids[1:], start=1))]
    found = {"token_logprobs": values, "tokens": [f"<{each}>" for each in ids], **changes}
    return 200, json.dumps({"choices": [{"logprobs": found}]})


def server_of(url: str) -> closing[TeacherServer]:
    return closing(TeacherServer(TeacherConfig(base_url=url, model=MODEL)))


def group_of(*samples: Sample) -> ScoredGroup:
    return ScoredGroup(group=Group(prompt=PROMPT, samples=samples), rewards=(0.0,) * len(samples))


def test_each_response_token_gets_the_value_at_its_position_in_its_own_context():
    """For a plain sample, and for one whose second context begins in the middle and contains an
    observation. Fails when values are shifted, or belong to observations or to the other context.
    """
    plain = whole_sample(PROMPT, 0, (5, 6))
    first = replace(completion(1, start=0, num_tokens=2, version=0), finish_reason="stop")
    again = replace(completion(1, start=5, num_tokens=1, version=0), finish_reason="stop")
    between = Observation(token_ids=(3, 4, 9), begins_context=True)
    turns = Sample(PROMPT, 1, (first, between, again, Observation((), is_final=True)))
    with serving(lambda _, request: echo(request)) as server, server_of(server.url) as teacher:
        reply = teacher.logprobs([group_of(plain, turns)])
    asked = sorted(request["prompt"] for request in server.requests)
    assert asked == [[1, 2, 5, 6], [1, 2, 7, 7], [3, 4, 9, 7]]
    assert all(request["echo"] and request["max_tokens"] == 0 for request in server.requests)
    np.testing.assert_allclose(reply.logprobs[plain.id], [-5.02, -6.03], rtol=1e-6)
    np.testing.assert_allclose(reply.logprobs[turns.id], [-7.02, -7.03, -7.03], rtol=1e-6)
    assert reply.metrics.read()["time/teacher_s"] > 0


def test_a_busy_server_gets_the_request_again_with_the_key(monkeypatch):
    monkeypatch.setenv("TEACHER_API_KEY", "sesame")
    busy = (503, "busy")
    with (
        serving(lambda n, request: busy if n == 1 else echo(request)) as server,
        server_of(server.url) as teacher,
    ):
        reply = teacher.logprobs([group_of(whole_sample(PROMPT, 0, (5,)))])
    assert len(server.requests) == 2
    assert server.keys == ["Bearer sesame"] * 2
    assert len(reply.logprobs) == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda _: (503, "down"), "failed: .*503"),
        (lambda _: (404, "no such model"), "failed: .*404"),
        (lambda _: (200, "{}"), "sent no log-probabilities of the prompt: it needs completions"),
        (lambda r: echo(r, token_logprobs=None), "sent no log-probabilities of the prompt"),
        (lambda r: echo(r, token_logprobs=[None, -1.0]), "sent 2 log-probabilities for 4 tokens"),
        (lambda r: echo(r, token_logprobs=[None, 1, "x", 1]), "sent 4 .* is not a finite number"),
        (lambda r: echo(r, token_logprobs=[None, -1, None, -1]), "that is not a finite number"),
    ],
)
def test_a_server_that_does_not_score_ends_the_run_with_its_address(answer, message, monkeypatch):
    """Fails when a token would be trained without its teacher, or hundreds of requests follow."""
    monkeypatch.setattr(teacher_server, "_MAX_RETRIES", 0)
    groups = [group_of(*(whole_sample(PROMPT, n, (5, 6)) for n in range(200)))]
    with serving(lambda _, request: answer(request)) as server:
        with server_of(server.url) as teacher, pytest.raises(RunError, match=message) as caught:
            teacher.logprobs(groups)
        assert f"teacher.base_url={server.url}, model {MODEL}" in str(caught.value)
    assert len(server.requests) < 100


def test_another_tokenizer_is_refused_at_the_start_with_the_differing_token():
    with serving(lambda _, request: echo(request)) as server, server_of(server.url) as teacher:
        teacher.check([4, 5], ["<4>", " <5>"], longest=100)
        teacher.check([4, 5], ["<4>", "\ufffd"], longest=100)
        with pytest.raises(RunError, match="token 5 is '<5>' there and 'five' here"):
            teacher.check([4, 7, 5], ["<4>", "<7>", "five"], longest=2)
    assert [len(request["prompt"]) for request in server.requests] == [2, 2, 2, 1]


def test_a_server_whose_texts_cannot_be_read_is_refused():
    """Fails when a text that nothing can be compared with counts as equal."""
    unread = lambda _, request: echo(request, tokens=["\ufffd"] * 2)  # noqa: E731
    with (
        serving(unread) as server,
        server_of(server.url) as teacher,
        pytest.raises(RunError, match="token 4 is '\ufffd' there and '<4>' here"),
    ):
        teacher.check([4, 5], ["<4>", "<5>"], longest=100)


def test_a_signal_ends_the_wait_for_a_silent_server():
    """Fails when the wait lasts as long as the server's time limit."""

    def silent(_number: int, request: dict) -> tuple[int, str]:
        time.sleep(3.0)
        return echo(request)

    def look() -> None:
        raise KeyboardInterrupt

    with (
        serving(silent) as server,
        server_of(server.url) as teacher,
        pytest.raises(KeyboardInterrupt),
    ):
        teacher.logprobs([group_of(whole_sample(PROMPT, 0, (5,)))], look)


def test_a_server_with_a_shorter_context_than_the_run_needs_is_refused_at_the_start():
    with serving(lambda _, request: echo(request)) as server:
        server.max_model_len = 99
        with (
            server_of(server.url) as teacher,
            pytest.raises(
                RunError, match=r"reads at most 99 tokens .* sequences of 100: start the server"
            ),
        ):
            teacher.check([4], ["<4>"], longest=100)
