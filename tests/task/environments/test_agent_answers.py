"""Whether a request of an agent continues from the answer before it, message by message."""

from __future__ import annotations

import json

import pytest

from april_rl.task.environments.agent.chat import CompletionRequest
from april_rl.task.environments.agent.responses import added_messages, response_of
from april_rl.task.environments.protocol import ToolCall, Turn

ASKED = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a"}]
MORE = {"role": "user", "content": "b"}
THOUGHT = "<think>\nhm\n</think>\n\nNo"
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def assistant(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def additions(said, *messages, asked=ASKED, calls=(), **wishes):
    """Return what a request with `messages` adds after the policy answered `said` to `asked`."""
    before = CompletionRequest.of_chat({"messages": asked, **wishes})
    answer = response_of(Turn(said, said, calls=calls), before, name="x", number=1)
    request = CompletionRequest.of_chat({"messages": list(messages), **wishes})
    return added_messages(before, answer, request)


KEPT = {
    "blanks around it": ("No", assistant(" No\n"), {}),
    "empty fields": ("No", assistant("No", refusal=None, annotations=[], name=""), {}),
    "without thoughts": (THOUGHT, assistant("No"), {}),
    "without thoughts that the prompt began": ("hm</think>No", assistant("No"), {}),
    "without thoughts that have no end": ("<think> hm", assistant(""), {}),
    "with its stop": ("one</code>", assistant("one</code>\n"), {"stop": ["</code>"]}),
    "without its stop": ("one</code>", assistant("one"), {"stop": ["</code>"]}),
}


@pytest.mark.parametrize("how", KEPT)
def test_an_answer_may_be_repeated_without_thoughts_or_with_its_stop(how):
    said, again, wishes = KEPT[how]
    assert additions(said, *ASKED, again, MORE, **wishes) == (MORE,)


OTHER = {
    "empty": ("No", ""),
    "null": ("The answer is 42.", None),
    "a part": ("The answer is 42.", "4"),
    "more": ("No", "REJECTED by the critic: No evidence. Start over"),
    "from nothing": ("", "any text"),
    "a thought of its own": ("No", THOUGHT),
    "a thought alone": (THOUGHT, "hm"),
    "a stop at which it did not end": ("No", "No</code>"),
}


@pytest.mark.parametrize("how", OTHER)
def test_another_answer_starts_a_new_context(how):
    said, again = OTHER[how]
    assert additions(said, *ASKED, assistant(again), MORE, stop=["</code>"]) is None


REWRITTEN = {
    "another system message": [{"role": "system", "content": "be brief!"}, ASKED[1]],
    "another question": [ASKED[0], {"role": "user", "content": "a "}],
    "a name": [ASKED[0], {**ASKED[1], "name": "Ann"}],
    "one left out": [ASKED[1]],
}


@pytest.mark.parametrize("how", REWRITTEN)
def test_a_rewritten_history_starts_a_new_context_although_the_answer_is_repeated(how):
    assert additions("No", *REWRITTEN[how], assistant("No"), MORE) is None


@pytest.mark.parametrize("field", ["name", "reasoning_content"])
def test_a_field_that_an_agent_adds_to_an_answer_starts_a_new_context(field):
    assert additions("No", *ASKED, assistant("No", **{field: "x"}), MORE) is None


def test_other_tools_start_a_new_context_although_the_messages_continue():
    before = CompletionRequest.of_chat({"messages": ASKED})
    answer = response_of(Turn("No", "No"), before, name="x", number=1)
    messages = [*ASKED, assistant("No"), MORE]
    same = CompletionRequest.of_chat({"messages": messages})
    other = CompletionRequest.of_chat({"messages": messages, "tools": TOOLS})
    assert added_messages(before, answer, same) == (MORE,)
    assert added_messages(before, answer, other) is None


@pytest.mark.parametrize(
    ("arguments", "goes_on"), [({"x": 1}, True), ({"x": 2}, False), ({}, False)]
)
def test_calls_are_equal_when_their_arguments_are_equal_data(arguments, goes_on):
    called = {"name": "f", "arguments": json.dumps(arguments, indent=2)}
    again = assistant(None, tool_calls=[{"id": "y", "type": "function", "function": called}])
    result = {"role": "tool", "tool_call_id": "y", "content": "3"}
    calls = (ToolCall("f", {"x": 1}),)
    found = additions("<tool_call>...", *ASKED, again, result, calls=calls, tools=TOOLS)
    assert found == ((result,) if goes_on else None)
