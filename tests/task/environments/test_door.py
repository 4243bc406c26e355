"""Whatever an environment, an agent or a tool returns, at most its own sample fails."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from episodes import EOS, answer, fresh, hear, plain, pool, say, text_of, tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from april_rl.config.environment import EnvironmentConfig
from april_rl.task.environments import door
from april_rl.task.environments.agent.chat import CompletionRequest, RefusedError
from april_rl.task.environments.dialogue import Dialogue
from april_rl.task.environments.protocol import StepResult
from april_rl.task.environments.turns import EpisodeRules, observation_of
from april_rl.types import Observation

CONFIG = EnvironmentConfig(function="m:f")
RULES = EpisodeRules(config=CONFIG, dialogue=plain(), max_response_tokens=1000)


class Unshowable:
    def __repr__(self):
        raise OSError("gone")

    def __len__(self):
        return 3


def nest(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.text(st.characters(), max_size=6),  # including unpaired surrogates
    st.binary(max_size=3),
    st.sampled_from([np.int64(5), np.bool_(True), np.float32(0.5), np.zeros(2), np.array("a")]),
    st.sampled_from([object(), Unshowable(), len, {1, 2}, ["END"], [""], [7], ("a",) * 9]),
    st.builds(nest, st.sampled_from([3, 40, 2000])),
    st.lists(
        st.dictionaries(st.sampled_from(["role", "content", "tool_calls"]), st.text(), max_size=3)
    ),
    st.builds(lambda c: [{"role": "tool", "content": c}], st.text(st.characters())),
)
FIELDS = st.fixed_dictionaries({}, optional=dict.fromkeys(StepResult._fields, ODD))


def through_the_door(returned):
    """Return what the controller gets when a process returns this value."""
    begun = heard_of(door.opening("begin", max_tokens=64))
    result = pickle.loads(pickle.dumps(door.result(returned, max_tokens=64)))
    json.dumps(result, ensure_ascii=False).encode()
    return observation_of([result], say(begun, "a"), RULES)


def heard_of(result):
    sample = fresh()
    return sample.with_span(observation_of([result], sample, RULES))


@given(FIELDS)
def test_a_step_result_is_plain_and_valid_or_names_its_fault(fields):
    """Fails when an odd value in any field reaches the controller, where it would end the run."""
    try:
        observation = through_the_door(StepResult(**fields))
    except door.GarbageError as error:
        str(error).encode()
        return
    assert isinstance(observation, Observation)
    assert type(observation.max_turn_tokens) is int
    assert observation.max_turn_tokens >= 0
    assert type(observation.begins_context) is type(observation.is_final) is bool
    assert all(type(stop) is str and stop for stop in observation.stop)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(), max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
) | st.builds(nest, st.sampled_from([3, 40, 900]))
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"])},
    optional={"content": JSON, "tool_calls": JSON, "name": JSON},
)
CALL = st.fixed_dictionaries({"name": st.just("f"), "arguments": st.text(st.characters()) | JSON})
CALLED = st.builds(lambda c: {"role": "assistant", "tool_calls": [{"function": c}]}, CALL)
KEYS = ("tools", "stop", "max_tokens", "max_completion_tokens", "stream", "stream_options", "n")
KEYS += ("tool_choice", "response_format", "logprobs", "temperature", "seed", "other")
BODY = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE | CALLED, min_size=1, max_size=2) | JSON},
    optional=dict.fromkeys(KEYS, JSON),
)


@given(BODY)
def test_a_request_is_refused_or_valid(body):
    """Fails when an odd value of any key of a request reaches the controller."""
    try:
        request = CompletionRequest.of_chat(body)
    except RefusedError as error:
        str(error).encode("utf-8", "backslashreplace")
        return
    told = StepResult(
        request.messages, tools=request.tools, stop=request.stop, max_turn_tokens=request.max_tokens
    )
    checked = door.opening(told, max_tokens=64)
    json.dumps(checked, ensure_ascii=False).encode()
    assert checked.stop == request.stop
    assert checked.max_turn_tokens == request.max_tokens
    assert all(type(message["role"]) is str for message in checked.messages)


@given(ODD)
def test_the_result_of_reset_is_plain_and_valid_or_names_its_fault(returned):
    try:
        result = door.opening(returned, max_tokens=64)
    except door.GarbageError as error:
        str(error).encode()
        return
    assert isinstance(heard_of(result), type(fresh()))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_turn_tokens", -5),
        ("max_turn_tokens", 1.5),
        ("stop", None),
        ("stop", [7]),
        ("stop", [""]),
        ("stop", "END"),
        ("stop", ["x"] * 5),
        ("stop", ["x" * 1000]),
        ("stop", ["\ud800"]),
        ("tools", [len]),
        ("tools", {"a": 1}),
        ("is_final", None),
        ("is_final", "no"),
        ("begins_context", []),
        ("reward", "1"),
        ("reward", float("nan")),
        ("messages", 7),
        ("messages", [{"content": "no role"}]),
        ("messages", [{"role": "tool", "content": 7}]),
        ("messages", [{"role": "tool", "content": "", "tool_calls": nest(700)}]),
        ("messages", [{"role": "tool", "content": "", "found": nest(40)}]),
        ("tools", [{"schema": nest(40)}]),
    ],
)
def test_a_wrong_field_is_named(field, value):
    with pytest.raises(door.GarbageError, match=rf"step returned {field}="):
        door.result(StepResult(**{field: value}), max_tokens=64)


def test_numpy_numbers_become_plain_numbers():
    returned = StepResult("a", np.float32(0.5), np.bool_(False), max_turn_tokens=np.int64(5))
    checked = door.result(returned._replace(begins_context=np.bool_(True)), max_tokens=64)
    message = {"role": "user", "content": "a"}
    assert json.dumps(checked) == json.dumps([[message], 0.5, False, [], True, 5, [], ""])


@pytest.mark.parametrize(
    ("text", "read"),
    {"\ud83c\udf7a": "🍺", "a\ud83cb": "a\ufffdb", "\udf7a": "\ufffd", "plain": "plain"}.items(),
)
def test_surrogates_are_joined_to_characters_or_replaced(text, read):
    assert door.repair(text) == read
    (message,) = door.opening([{"role": "tool", "content": text}], max_tokens=64).messages
    assert message["content"] == read


def test_arguments_of_calls_reach_the_template_as_mappings():
    call = {"function": {"name": "add", "arguments": '{"a": "\\ud83c"}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    (message,) = door.opening([said], max_tokens=64).messages
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": "\ufffd"}
    call["function"]["arguments"] = "{"
    with pytest.raises(door.GarbageError, match="arguments that are not JSON"):
        door.opening([said], max_tokens=64)


def test_a_huge_text_is_cut_before_it_is_tokenized():
    """Fails when the controller has to tokenize 10 MiB from a tool, or text is cut that would still
    fit.
    """
    (message,) = door.opening("1" * 10_000_000, max_tokens=100).messages
    assert len(message["content"]) == 100 * door.CHARACTERS_PER_TOKEN
    two = [{"role": "tool", "content": "2" * 6300}, {"role": "tool", "content": "3" * 6300}]
    first, second = door.opening(two, max_tokens=100).messages
    assert first == two[0]
    assert len(second["content"]) < 100


def test_a_final_result_of_reset_is_refused():
    with pytest.raises(door.GarbageError, match="is_final=True"):
        door.opening(StepResult("over", is_final=True), max_tokens=64)


def test_deeply_nested_arguments_of_a_call_fail_that_turn(monkeypatch):
    """Fails when they reach pickle, whose recursion would end the thread that sends turns."""
    dialogue = Dialogue(
        tokenizer=tiny_tokenizer(), is_chat=False, variables={}, stop_ids=frozenset({EOS})
    )
    call = {"function": {"name": "price", "arguments": {"item": nest(700)}}}
    monkeypatch.setattr(type(dialogue.tokenizer), "tool_calls", lambda *_: [call])
    monkeypatch.setattr(type(dialogue), "has_tools", True, raising=False)
    turn = dialogue.turn((20, EOS), is_truncated=False, is_last=False)
    assert turn.calls == ()
    assert "nested more than 32 deep" in turn.fault


def test_an_error_in_the_controller_fails_only_its_sample(monkeypatch):
    with pool() as environments:
        first, second = (hear(environments, fresh(n)) for n in (1, 2))

        def broken(*_, **__):
            raise KeyError("template")

        with monkeypatch.context() as patched:
            patched.setattr("april_rl.task.environments.pool.observation_of", broken)
            observation = answer(environments, say(first, "a"))
        assert observation.failure == "the environment has failed: KeyError: 'template'"
        assert text_of(answer(environments, say(second, "b"))) == "1b"
