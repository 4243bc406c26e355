"""Tool calls in an agent's requests, as chat templates read them."""

from __future__ import annotations

import json

import pytest
from agent_episodes import agents, play, question, tokenizer

from april_rl.task.environments.agent.chat import CompletionRequest, RefusedError

BEGIN = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls %}{% set call = call.function %}"
)
END = (
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
JSON = '<tool_call>{"name": "{{ call.name }}", "arguments": '
TEMPLATES = {
    "Qwen2.5": JSON + "{{ call.arguments | tojson }}}</tool_call>",
    "Qwen3": JSON + "{% if call.arguments is string %}{{ call.arguments }}{% else %}"
    "{{ call.arguments | tojson }}{% endif %}}</tool_call>",
    "Qwen3-Coder": "<tool_call>{{ call.name }}{% for name, value in call.arguments | items %}"
    " <parameter={{ name }}>{{ value }}</parameter>{% endfor %}</tool_call>",
}
READ = dict.fromkeys(TEMPLATES, '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}')
READ["Qwen3-Coder"] = "<tool_call>weather <parameter=city>Ulm</parameter></tool_call>"
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'


@pytest.mark.parametrize("form", TEMPLATES)
def test_the_policy_reads_its_earlier_call_as_it_wrote_it(tmp_path, form):
    """Fails when a template gets the arguments as JSON text, as in OpenAI's API: it would write
    them as a quoted string, or refuse them.
    """
    template = BEGIN + TEMPLATES[form] + END
    with agents(tmp_path, chat_template=template) as pool:
        sample, reply = play(pool, question("way_back"), CALL, "helped", "it rains")
    assert (reply.is_final, reply.reward, reply.failure) == (True, 8.0, "")
    start = sum(sample.context_lengths[:2])
    last = tokenizer(template).show_text(sample.sequence[start:])
    assert f"assistant\n{READ[form]}" in last
    assert "rain in Ulm" in last
    assert "None" not in last, "content that is null"


@pytest.mark.parametrize(
    ("arguments", "read"),
    [('{"city": null}', {"city": None}), ("", {}), ({"city": "Ulm"}, {"city": "Ulm"})],
)
def test_arguments_of_calls_are_mappings(arguments, read):
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "c", "type": "function", "function": function}
    asked = CompletionRequest.of_chat({"messages": [said := {"role": "user", "content": "a"}]})
    assert asked.messages == (said,)
    called = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}
    (message,) = CompletionRequest.of_chat({"messages": [called]}).messages
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{**call, "function": {**function, "arguments": read}}],
    }


@pytest.mark.parametrize("arguments", ["{", "[1]", json.dumps("text")])
def test_arguments_that_are_not_a_json_object_are_refused(arguments):
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    message = {"role": "assistant", "tool_calls": [call]}
    with pytest.raises(RefusedError, match="a message: weather is called with"):
        CompletionRequest.of_chat({"messages": [message]})
