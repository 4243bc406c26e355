"""Rows become tokenized prompts."""

import json

import datasets
import pytest
from word_tokenizer import CHAT, hf_tokenizer, words

from april_rl.config.task import PromptSetConfig
from april_rl.errors import DataError
from april_rl.task.data import tokenized
from april_rl.task.data.prompts import load_prompts
from april_rl.task.data.tokenizer import Tokenizer, TokenizerError, load_tokenizer


def without_start_token():
    """Return a tokenizer that adds no special tokens."""
    tokenizer = hf_tokenizer()
    tokenizer.backend_tokenizer.post_processor = None
    return tokenizer


def tokenize(
    tmp_path, *prompts, chat_template=CHAT, backend=None, limit=100, has_agent=False, **settings
):
    """Return the prompts of a file with one row for each text."""
    path = tmp_path / "data.jsonl"
    rows = [{"prompt": prompt, "answer": str(n)} for n, prompt in enumerate(prompts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = backend() if backend else hf_tokenizer(chat_template)
    tokenizer = Tokenizer(made, path="models/words")
    chosen = PromptSetConfig(path=str(path), **settings)
    return load_prompts(
        chosen, tokenizer, key="data.path", max_prompt_tokens=limit, has_agent=has_agent
    )


def message(content, role="user"):
    return {"role": role, "content": content}


def test_a_chat_prompt_ends_where_the_answer_begins_and_has_no_second_start_token(tmp_path):
    (prompt,) = tokenize(tmp_path, "one two", system_prompt="three")
    assert words(prompt.token_ids) == "system three <eos> user one two <eos> assistant"
    assert prompt.text == "system three <eos> user one two <eos> assistant"


def test_a_list_of_messages_is_used_as_it_is(tmp_path):
    (prompt,) = tokenize(tmp_path, [message("three", "system"), message("one")])
    assert words(prompt.token_ids) == "system three <eos> user one <eos> assistant"


@pytest.mark.parametrize("environment", [True, False])
def test_an_agent_gets_the_bare_question_and_the_policy_gets_no_prompt(tmp_path, environment):
    """Other data sets of the same run are prompts as usual. Fails when the policy reads the
    question twice.
    """
    prompts = tokenize(
        tmp_path, "one", "two", has_agent=True, environment=environment, instruction="three"
    )
    texts = {False: "user one\n\nthree <eos> assistant", True: "one\n\nthree"}
    assert prompts[0].text == texts[environment]
    assert [bool(prompt.token_ids) for prompt in prompts] == [not environment] * 2
    assert bool(prompts[1:][0].token_ids) is not environment


def test_a_plain_prompt_is_put_into_the_template_with_a_start_token(tmp_path):
    (prompt,) = tokenize(tmp_path, "one {x}", template="Q: {prompt} A:")
    assert prompt.text == "Q: one {x} A:"
    assert words(prompt.token_ids) == "<bos> Q: one <unk> A:"


def test_the_instruction_is_a_paragraph_after_the_question(tmp_path):
    (prompt,) = tokenize(tmp_path, "one", instruction="two")
    assert prompt.text == "user one\n\ntwo <eos> assistant"
    messages = [message("three", "system"), message("one")]
    (prompt,) = tokenize(tmp_path, messages, instruction="two")
    assert prompt.text == "system three <eos> user one\n\ntwo <eos> assistant"
    (prompt,) = tokenize(tmp_path, "one", instruction="two", template="plain")
    assert prompt.text == "one\n\ntwo"


def test_variables_of_the_chat_template_reach_it(tmp_path):
    template = CHAT + "{% if enable_thinking is false %} three{% endif %}"
    thinking = {"enable_thinking": False}
    (prompt,) = tokenize(tmp_path, "one", chat_template=template, chat_template_kwargs=thinking)
    assert prompt.text.endswith("assistant three")
    with pytest.raises(TokenizerError, match=r"enable_thinking has no effect: .*models/words"):
        tokenize(tmp_path, "one", chat_template_kwargs=thinking)


def test_prompts_that_are_too_long_are_left_out_and_counted(tmp_path):
    result = tokenize(tmp_path, "one two three", "one", "two", limit=4)
    path = tmp_path / "data.jsonl"
    assert [(p.id, p.source) for p in result] == [(0, f"{path}:2"), (1, f"{path}:3")]
    assert result.all_lengths.tolist() == [6, 4, 4]
    assert result.summary == (
        f"{path}: 2 prompts, 1 left out as longer than data.max_prompt_tokens=4 (the longest has 6)"
    )


BAD_SETTINGS = {
    "all too long": (["one"], {"limit": 1}, "leaves out all 1.*has 4 tokens"),
    "no tokens": (
        ["one", "  ", " "],
        {"template": "plain", "backend": without_start_token},
        "data.jsonl:2: .*no token.*2 of 3 prompts.*model.path",
    ),
    "plain messages": (
        ["one", [message("one")]],
        {"template": "plain"},
        "data.jsonl:2: .*agents and a data.template other than chat take text only",
    ),
    "plain system": (
        ["one"],
        {"template": "plain", "system_prompt": "two"},
        "data.system_prompt has no effect with data.template=plain",
    ),
    "plain variables": (
        ["one"],
        {"template": "plain", "chat_template_kwargs": {"enable_thinking": False}},
        "data.chat_template_kwargs has no effect with data.template=plain",
    ),
    "two systems": (
        [[message("one")], [message("one", "system"), message("one")]],
        {"system_prompt": "two"},
        "data.jsonl:2: .*system message of its own",
    ),
    "refused": (
        [[message("one"), message("one", "tool")]],
        {},
        "data.jsonl:1: .*models/words.*no tools",
    ),
    "a template that fails": (
        ["one", "two"],
        {"chat_template": "{{ messages[0].content }}{{ messages[0].content.index('one') }}"},
        "data.jsonl:2: .*models/words.*substring not found",
    ),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_messages_that_the_template_refuses_give_one_error(name, tmp_path):
    prompts, settings, expected = BAD_SETTINGS[name]
    with pytest.raises(DataError, match=expected) as error:
        tokenize(tmp_path, *prompts, **settings)
    assert "\n" not in str(error.value)


def test_a_missing_chat_template_names_both_keys(tmp_path):
    with pytest.raises(TokenizerError, match=r"data\.template=chat .*model\.path=models/words"):
        tokenize(tmp_path, "one", chat_template=None)


def test_a_saved_tokenizer_is_loaded_and_decodes_without_special_tokens(tmp_path):
    hf_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    (token_ids,) = tokenizer.encode(["one two <eos>"], add_special_tokens=True)
    assert words(token_ids) == "<bos> one two <eos>"
    assert tokenizer.decode(token_ids) == "one two"


def test_a_folder_without_tokenizer_names_the_key(tmp_path):
    for path in (str(tmp_path), "/nowhere/at/all"):
        with pytest.raises(TokenizerError, match=rf"model\.path={path}: cannot load the tokenizer"):
            load_tokenizer(path)


def without_unknown_token():
    """Return a tokenizer whose token for unknown text also begins and ends texts, as in GPT-2."""
    tokenizer = hf_tokenizer()
    tokenizer.eos_token = "<unk>"
    return tokenizer


def test_prompts_that_the_model_cannot_read_are_reported_with_an_example(tmp_path):
    table = tokenize(tmp_path, "one two", "one zwei two drei", template="plain")
    assert table.notes == (
        f"{tmp_path / 'data.jsonl'}: 25% of the tokens of these prompts are unknown to the model, "
        f"which reads {tmp_path / 'data.jsonl'}:2 as '<bos> one <unk> two <unk>'; use prompts that "
        "it can read, or another model.path",
    )
    assert table[:1].notes == table.notes


def test_a_few_unknown_tokens_or_a_tokenizer_without_one_are_not_reported(tmp_path):
    few = ["one " * 30, "one zwei"]
    assert tokenize(tmp_path, *few, template="plain").notes == ()
    assert tokenize(tmp_path, "zwei drei", backend=without_unknown_token).notes == ()


def test_a_cached_table_reports_the_same_unknown_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenized, "KEEP_FROM_BYTES", 1)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "kept")
    tables = [tokenize(tmp_path, "one", "zwei") for _ in range(2)]
    assert len(list((tmp_path / "kept" / "april_rl").iterdir())) == 1
    assert tables[1].notes == tables[0].notes != ()
