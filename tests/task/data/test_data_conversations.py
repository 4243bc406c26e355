"""Conversations in a column: which ones are prompts, and what the chat template gets."""

import json

import pyarrow as pa
import pyarrow.parquet
import pytest
from byte_tokenizer import CHAT, hf_byte_tokenizer

from april_rl.config.task import PromptSetConfig
from april_rl.errors import DataError
from april_rl.task.data.prompts import load_prompts
from april_rl.task.data.tokenizer import Tokenizer

# Like Qwen2.5, it writes an assistant's calls as JSON whose arguments are a mapping.
CALLS = CHAT.replace(
    "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}",
    "{{ m.content }}{% for call in m.tool_calls %}<tool_call>{{ call.function.name }} "
    "{{ call.function.arguments.a }} {{ call.id }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}",
)


def message(role, content, **more):
    return {"role": role, "content": content, **more}


ASKED = message("user", "What is 1 + 1?")
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLED = message("assistant", None, tool_calls=[CALL])
RESULT = message("tool", "2", name="add", tool_call_id="c1")


def load(tmp_path, *prompts, chat_template=CALLS, suffix=".jsonl", columns=None, **settings):
    """Return the prompts of a file with one row for each conversation."""
    path = tmp_path / f"data{suffix}"
    rows = [{"prompt": prompt, "answer": "2", **(columns or {})} for prompt in prompts]
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = Tokenizer(hf_byte_tokenizer(chat_template), path="models/bytes")
    chosen = PromptSetConfig(path=str(path), **settings)
    return load_prompts(chosen, tokenizer, key="data.path", max_prompt_tokens=1000)


REFUSED = {
    "the solution": ([ASKED, message("assistant", "So 2.")], "ends with .* assistant.*hold the an"),
    "a system alone": ([message("system", "Be brief.")], "here the last is from the system"),
    "a system last": ([ASKED, message("system", "Be brief.")], "here the last is from the system"),
    "no user": ([CALLED, RESULT], "has no question"),
    "another role": ([message("human", "1 + 1?")], r"message 1 has the role 'human'.*assistant"),
    "an empty turn": ([ASKED, message("assistant", ""), ASKED], r"message 2 \(assistant\) is"),
    "an empty question": ([message("user", " ")], r"message 1 \(user\) is empty"),
    "no content": ([ASKED, message("assistant", None), ASKED], "message 2 .*must have text as"),
    "parts": ([message("user", [{"type": "text", "text": "x"}])], "message 1 .*must have text as"),
    "arguments": (
        [
            ASKED,
            {**CALLED, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]},
            RESULT,
        ],
        "message 2: f is called with arguments that are not JSON",
    ),
    "a call without a name": (
        [ASKED, {**CALLED, "tool_calls": [{"id": "c1"}]}, RESULT],
        "message 2: no function is named in the call",
    ),
    "a calling user": ([{**ASKED, "tool_calls": [CALL]}], "only the assistant can call tools"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_conversation_without_a_question_is_refused_with_its_row(kind, tmp_path):
    prompt, expected = REFUSED[kind]
    with pytest.raises(DataError, match=rf"data\.jsonl:2: data\.prompt_column=prompt .*{expected}"):
        load(tmp_path, [ASKED], prompt)


def test_a_refused_conversation_says_which_columns_there_are(tmp_path):
    """NuminaMath is an example: its messages contain the solution, and its `problem` is the
    question.
    """
    prompt = [ASKED, message("assistant", "2")]
    with pytest.raises(DataError, match=r"\(columns: prompt, answer, problem\)"):
        load(tmp_path, prompt, columns={"problem": "What is 1 + 1?"})


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_tool_calls_reach_the_template_with_arguments_as_a_mapping(tmp_path, suffix):
    (prompt,) = load(tmp_path, [ASKED, CALLED, RESULT], suffix=suffix)
    assert "<|im_start|>assistant\n<tool_call>add 1 c1</tool_call><|im_end|>" in prompt.text
    assert prompt.text.endswith(
        "<tool_response>2</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_arguments_have_only_the_fields_of_their_own_call(tmp_path):
    """A table adds the fields of the other rows as nulls."""
    calls = [{"name": "add", "arguments": {name: 1}} for name in ("a", "b")]
    chats = [[ASKED, {**CALLED, "tool_calls": [call]}, RESULT] for call in calls]
    template = CALLS.replace("call.function.arguments.a", "call.function.arguments | tojson")
    texts = [prompt.text for prompt in load(tmp_path, *chats, chat_template=template)]
    assert ['{"a": 1}' in texts[0], '{"b": 1}' in texts[1], "null" in "".join(texts)] == [1, 1, 0]


def test_the_name_of_a_tool_reaches_the_template(tmp_path):
    template = CALLS.replace("<tool_response>", "<tool_response>{{ m.name }}={{ m.tool_call_id }}:")
    (prompt,) = load(tmp_path, [ASKED, CALLED, RESULT], chat_template=template)
    assert "<tool_response>add=c1:2" in prompt.text


def test_messages_that_a_template_leaves_out_are_refused(tmp_path):
    """Fails when an assistant that called a tool becomes an empty turn."""
    with pytest.raises(DataError, match=r"data\.jsonl:2: .*leaves out tool_calls \(message 2\)"):
        load(tmp_path, [ASKED], [ASKED, CALLED, RESULT], chat_template=CHAT)
    mute = CHAT.replace("{% for m in messages %}", "{% for m in messages if m.role == 'user' %}")
    prompt = [message("developer", "Be brief."), ASKED]
    with pytest.raises(DataError, match=r"leaves out messages of the developer \(message 1\)"):
        load(tmp_path, prompt, chat_template=mute)


def test_two_user_messages_in_a_row_are_refused_only_by_a_template_that_does(tmp_path):
    assert len(load(tmp_path, [ASKED, ASKED])) == 1
    strict = "{% if messages | length > 1 %}{{ raise_exception('roles alternate') }}{% endif %}"
    with pytest.raises(DataError, match=r"data\.jsonl:1: .*roles alternate"):
        load(tmp_path, [ASKED, ASKED], chat_template=strict + CHAT)


def test_messages_as_json_text_are_messages(tmp_path):
    assert load(tmp_path, json.dumps([ASKED]))[0].text == load(tmp_path, [ASKED])[0].text
    assert "user\n[1, 2] is" in load(tmp_path, "[1, 2] is a list of what?")[0].text


def test_instruction_and_pattern_apply_to_the_question_not_to_a_tool(tmp_path):
    settings = {"instruction": "Be brief.", "prompt_pattern": "(1.*)"}
    (prompt,) = load(tmp_path, [ASKED, CALLED, RESULT], **settings)
    assert "user\n1 + 1?\n\nBe brief.<|im_end|>" in prompt.text
    assert "<tool_response>2</tool_response>" in prompt.text


def test_rows_that_differ_only_in_a_call_are_different(tmp_path):
    other = {**CALL, "function": {"name": "add", "arguments": '{"a": 5}'}}
    chats = [[ASKED, {**CALLED, "tool_calls": [call]}, RESULT] for call in (CALL, other, CALL)]
    table = load(tmp_path, *chats)
    assert (len(table), table.num_duplicates) == (2, 1)


def test_an_unread_column_of_tools_or_images_is_reported(tmp_path):
    columns = {"tools": [{"name": "add"}], "images": ["a.png"], "image_id": None, "level": 1}
    images, tools = load(tmp_path, [ASKED], columns=columns).notes
    assert "column tools is not read" in tools
    assert "column images is not read, and 1 of 1 rows have something in it" in images
    assert load(tmp_path, [ASKED], columns={"images": []}).notes == ()


@pytest.mark.parametrize("mark", ["<image>", "<image_1>", "<|image_pad|>", "<video>"])
def test_a_question_about_an_image_is_refused(tmp_path, mark):
    """Without a column of images the mark is ordinary text, as in a question about HTML."""
    prompts, plain = ["one", f"{mark}What is it?"], {"template": "plain"}
    with pytest.raises(DataError, match=r"data\.jsonl:2: .*column images is not read.*leave such"):
        load(tmp_path, *prompts, columns={"images": ["a.png"]}, **plain)
    assert len(load(tmp_path, *prompts, **plain)) == 2
