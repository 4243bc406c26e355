"""Environments in the form of TRL's classes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from agent_episodes import encode, say, tokenizer
from byte_tokenizer import CHAT, END, hf_byte_tokenizer
from episodes import answer, environment_pool, fresh, hear

from april_rl.config.environment import EnvironmentConfig
from april_rl.config.runtime import UserCodeConfig
from april_rl.task.data.tokenizer import Tokenizer, TokenizerError
from april_rl.task.environments.dialogue import Dialogue
from april_rl.task.environments.loading import Description, describe
from april_rl.task.environments.protocol import EnvironmentFailedError, ToolCall
from april_rl.task.environments.turns import EpisodeRules
from april_rl.types import Observation, Sample

HI = {"role": "user", "content": "hi"}
LIMITS = UserCodeConfig()


def dialogue(tools=()):
    return Dialogue(
        tokenizer=tokenizer(),
        is_chat=True,
        variables={"tools": list(tools)} if tools else {},
        stop_ids=frozenset(encode(END)),
        has_tools=bool(tools),
    )


def config_of(name, **args):
    return EnvironmentConfig(
        function=f"tool_classes:{name}", args=args, num_processes=1, max_turns=4
    )


def pool(config, tmp_path):
    asks = dialogue(describe(config, LIMITS).tools)
    rules = EpisodeRules(config=config, dialogue=asks, max_response_tokens=9999)
    return environment_pool(config, rules, folder=tmp_path)


def ask(**columns):
    prompt = replace(fresh().prompt, text="question", answer="20", columns=columns)
    return Sample(prompt, 0)


def call(name, arguments="{}"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def text_of(observation):
    return tokenizer().show_text(observation.token_ids)


def test_the_model_sees_the_tools_and_the_columns_of_reset_are_requested():
    found = describe(config_of("Counter"), LIMITS)
    assert [tool["function"]["name"] for tool in found.tools] == [
        "fail",
        "find",
        "increment",
        "leave",
        "power",
        "wait",
    ]
    increment = found.tools[2]["function"]
    assert increment["description"] == "Increment the counter."
    assert increment["parameters"]["properties"]["step"]["type"] == "integer"
    assert found.columns == ("target",)
    prompt = tokenizer().chat_text([HI], {"tools": list(found.tools)}, begins_turn=False)
    assert '"name": "increment"' in prompt
    plain = EnvironmentConfig(function="environment_classes:Plain")
    assert describe(plain, LIMITS) == Description()


@pytest.fixture(scope="module")
def counters_of_a_module(tmp_path_factory):
    with pool(config_of("Counter"), tmp_path_factory.mktemp("counters")) as environments:
        yield environments


@pytest.fixture
def counters(counters_of_a_module):
    yield counters_of_a_module
    counters_of_a_module.forget(ask().id)


def test_a_class_in_trls_form_runs_its_tools_until_a_turn_calls_none(counters):
    sample = hear(counters, ask(target=3))
    assert text_of(sample.spans[0]) == (
        f"<|im_start|>user\nCount to 3.{END}\n<|im_start|>assistant\n"
    )
    one, two = (call("increment", f'{{"step": {step}}}') for step in (1, 2))
    sample = hear(counters, say(sample, f"two calls {one}\n{two}"))
    assert text_of(sample.spans[-1]) == (
        f"\n<|im_start|>user\n<tool_response>1</tool_response>{END}\n"
        f"<|im_start|>user\n<tool_response>3</tool_response>{END}\n<|im_start|>assistant\n"
    )
    assert answer(counters, say(sample, "there")) == Observation((), True, 1.0)


@pytest.mark.parametrize("name", ["add", "TOOLS"])
def test_functions_are_tools_without_a_reward(name, tmp_path):
    config = config_of(name)
    found = describe(config, LIMITS)
    names = [tool["function"]["name"] for tool in found.tools]
    assert names == (["add"] if name == "add" else ["add", "later"])
    assert not found.has_reward
    assert set(found.tools[0]["function"]["parameters"]["properties"]) == {"first", "second"}
    with pool(config, tmp_path) as environments:
        sample = hear(environments, ask())
        turn = call(names[-1], '{"first": 2, "second": 3}')
        sample = hear(environments, say(sample, turn))
        assert "<tool_response>5</tool_response>" in text_of(sample.spans[-1])
        assert answer(environments, say(sample, "five")) == Observation((), True, 0.0)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("NUMBER", "3 is neither a class, a function nor a list of them"),
        ("nothing", "has no function 'nothing'"),
        ("TWICE", "a tool cannot be called add"),
        ("step", "a tool cannot be called step"),
        ("undescribed", "the tool undescribed needs a type hint for each argument and a docstring"),
    ],
)
def test_an_object_that_cannot_be_a_tool_is_refused(name, sentence):
    with pytest.raises(EnvironmentFailedError, match=sentence):
        describe(config_of(name), LIMITS)


def test_functions_take_no_arguments_of_the_environment():
    with pytest.raises(EnvironmentFailedError, match="has no argument 'size'"):
        describe(config_of("add", size=1), LIMITS)


REPLIES = {
    call("wait"): "waited",
    call("fail"): "{'error': 'no such counter'}",
    call("find"): "{'error': 'StopIteration'}",
    call("leave"): "{'error': '3'}",
    call("power", '{"function": 2, "run": 5}'): "<tool_response>32<",
    call("power", '{"function": 9, "run": 9999}'): "{'error': 'Exceeds the limit",
    call("increment", '{"step": NaN}'): "the call cannot be read: Out of range",
    call("increment", '{"step": 1e999}'): "the call cannot be read: Out of range",
    call("decrement"): "{'error': 'there is no tool decrement; use fail, find, increment, le",
    call("increment", '{"size": 1}'): "unexpected keyword argument 'size'",
    "<tool_call>{not JSON}</tool_call>": "the call cannot be read",
    f"<tool_call>{'[' * 3000}": "the call cannot be read",
    "<tool_call>[1]</tool_call>": "the call cannot be read: it names no function",
    call(
        "increment", "3"
    ): "the call cannot be read: the arguments of increment must be a mapping: 3",
}


@pytest.mark.parametrize("turn", REPLIES)
def test_the_policy_reads_errors_of_tools_and_of_unreadable_calls(turn, counters):
    sample = hear(counters, ask(target=3))
    observation = answer(counters, say(sample, turn))
    assert REPLIES[turn] in text_of(observation)
    assert not observation.is_final


def test_the_last_turn_is_rewarded_although_it_calls_a_tool(counters):
    sample = hear(counters, ask(target=4))
    for _ in range(3):
        sample = hear(counters, say(sample, call("increment", '{"step": 1}')))
    last = answer(counters, say(sample, call("increment", '{"step": 1}')))
    assert last == Observation((), True, 1.0)


def test_calls_in_thoughts_do_not_count():
    told = dialogue(describe(config_of("Counter"), LIMITS).tools)
    text = f"<think>{call('fail')}</think>\n{call('wait')}"
    assert told.turn(encode(text), is_truncated=False, is_last=False).calls == (
        ToolCall("wait", {}),
    )
    unfinished = told.turn(encode(f"<think>{call('fail')}"), is_truncated=False, is_last=False)
    assert unfinished.calls == ()
    assert told.turn(encode(text), is_truncated=True, is_last=True).calls == ()


def test_tools_that_cannot_be_described_or_called_are_refused():
    with pytest.raises(EnvironmentFailedError, match=r"tool_classes:Undescribed: .*docstring"):
        describe(config_of("Undescribed"), LIMITS)
    with pytest.raises(EnvironmentFailedError, match="there is no module nowhere"):
        describe(EnvironmentConfig(function="nowhere:Class"), LIMITS)
    plain = Tokenizer(hf_byte_tokenizer("{{ messages }}"), path="bytes")
    with pytest.raises(TokenizerError, match=r"the tool calls of .*bytes cannot be parsed"):
        plain.check_tool_calls()
    with pytest.raises(TokenizerError, match="does not show tools to the model"):
        plain.check_chat({"tools": []})


def test_a_tokenizer_may_define_the_form_of_its_models_calls():
    made = hf_byte_tokenizer(CHAT.replace("<tool_call>", ""))
    made.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor_pattern": r"<\|im_start\|>\w+\n",
        "fields": {
            "tool_calls": {
                "open": "CALL ",
                "close": ";",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"content": "text"},
        },
    }
    own = Tokenizer(made, path="bytes")
    own.check_tool_calls()
    assert own.tool_calls('I CALL {"name": "wait", "arguments": {}};') == [
        {"type": "function", "function": {"name": "wait", "arguments": {}}}
    ]
