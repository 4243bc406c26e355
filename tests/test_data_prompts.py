"""Rows to tokenized prompts, and the stream of them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from april_rl.config.choices import Template
from april_rl.data.errors import DataError
from april_rl.data.prompts import tokenize_prompts
from april_rl.data.rows import Row
from april_rl.data.stream import PromptStream
from april_rl.data.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from april_rl.types import Prompt

SPECIAL = ["<unk>", "<bos>", "<eos>"]
WORDS = [*SPECIAL, "system", "user", "assistant", "one", "two", "three", "Q:", "A:"]
CHAT = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role }} {{ m.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


def hf_tokenizer(chat_template=CHAT):
    backend = Backend(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", WORDS.index("<bos>"))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def words(token_ids):
    return " ".join(WORDS[i] for i in token_ids)


def without_start_token():
    """A tokenizer that adds nothing."""
    tokenizer = hf_tokenizer()
    tokenizer.backend_tokenizer.post_processor = None
    return tokenizer


def tokenized(*rows, chat_template=CHAT, backend=None, **changes):
    settings = {
        "template": Template.chat,
        "plain_template": "{prompt}",
        "system_prompt": "",
        "max_prompt_tokens": 100,
    } | changes
    made = backend() if backend else hf_tokenizer(chat_template)
    tokenizer = Tokenizer(made, path="models/words")
    return tokenize_prompts(rows, tokenizer, **settings)


def row(prompt, line=1):
    return Row(prompt=prompt, answer="1", source=f"data.jsonl:{line}")


def message(content, role="user"):
    return {"role": role, "content": content}


def test_a_chat_prompt_ends_where_the_answer_begins_and_has_no_second_start_token():
    (prompt,) = tokenized(row("one two"), system_prompt="three")
    assert words(prompt.token_ids) == "system three <eos> user one two <eos> assistant"
    assert prompt.text == "system three <eos> user one two <eos> assistant"


def test_a_list_of_messages_is_used_as_it_is():
    (prompt,) = tokenized(row((message("three", "system"), message("one"))))
    assert words(prompt.token_ids) == "system three <eos> user one <eos> assistant"


def test_a_plain_prompt_has_the_template_around_it_and_the_start_token():
    (prompt,) = tokenized(row("one {x}"), template=Template.plain, plain_template="Q: {prompt} A:")
    assert prompt.text == "Q: one {x} A:"
    assert words(prompt.token_ids) == "<bos> Q: one <unk> A:"


def test_prompts_that_are_too_long_are_left_out_and_counted():
    long, short = row("one two three", 1), row("one", 2)
    result = tokenized(long, short, short, max_prompt_tokens=4)
    assert [(p.id, p.source) for p in result] == [(0, "data.jsonl:2"), (1, "data.jsonl:2")]
    assert (result.num_left_out, result.longest_tokens) == (1, 6)


BAD_SETTINGS = {
    "all too long": ((row("one"),), {"max_prompt_tokens": 1}, "leaves out all 1.*has 4 tokens"),
    "no tokens": (
        (row("one", 1), row("  ", 2), row(" ", 3)),
        {"template": Template.plain, "backend": without_start_token},
        "data.jsonl:2: .*no token.*2 of 3 prompts.*model.path",
    ),
    "plain messages": (
        (row((message("one"),), 7),),
        {"template": Template.plain},
        "data.jsonl:7: .*data.template=plain takes text only",
    ),
    "plain system": (
        (row("one"),),
        {"template": Template.plain, "system_prompt": "two"},
        "data.system_prompt works with data.template=chat only",
    ),
    "two systems": (
        (row((message("one", "system"),), 3),),
        {"system_prompt": "two"},
        "data.jsonl:3: .*system message of its own",
    ),
    "refused": ((row((message("one", "tool"),), 5),), {}, "data.jsonl:5: .*models/words.*no tools"),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_what_the_template_cannot_take_is_one_message(name):
    rows, settings, expected = BAD_SETTINGS[name]
    with pytest.raises(DataError, match=expected):
        tokenized(*rows, **settings)


def test_a_missing_chat_template_names_both_keys():
    with pytest.raises(TokenizerError, match=r"data\.template=chat .*model\.path=models/words"):
        tokenized(row("one"), chat_template=None)


def test_a_saved_tokenizer_is_loaded_and_decodes_without_special_tokens(tmp_path):
    hf_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    (token_ids,) = tokenizer.encode(["one two <eos>"], add_special_tokens=True)
    assert words(token_ids) == "<bos> one two <eos>"
    assert tokenizer.decode(token_ids) == "one two"


def test_a_folder_without_tokenizer_names_the_key(tmp_path):
    for path in (str(tmp_path), "/nowhere/at/all"):
        with pytest.raises(TokenizerError, match=rf"model\.path={path}: no tokenizer there"):
            load_tokenizer(path)


def stream(num_prompts, seed=0):
    prompts = [
        Prompt(id=i, token_ids=(i,), text=str(i), answer="", source=f"f:{i}")
        for i in range(num_prompts)
    ]
    return PromptStream(prompts, seed=seed)


def taken(source, count):
    return [source.take() for _ in range(count)]


@given(st.integers(1, 40), st.integers(0, 2**40))
def test_every_epoch_has_every_prompt_once_and_ids_count_up(num_prompts, seed):
    prompts = taken(stream(num_prompts, seed), 3 * num_prompts)
    assert [p.id for p in prompts] == list(range(3 * num_prompts))
    for epoch in range(3):
        part = prompts[epoch * num_prompts : (epoch + 1) * num_prompts]
        assert sorted(p.text for p in part) == sorted(str(i) for i in range(num_prompts))


def test_epochs_and_seeds_have_orders_of_their_own():
    epochs = [[p.text for p in taken(stream(50, seed), 100)] for seed in (0, 1)]
    orders = [texts[start : start + 50] for texts in epochs for start in (0, 50)]
    assert all(a != b for a, b in pairwise(orders))
    assert orders[0] != sorted(orders[0], key=int)


@given(st.integers(1, 20), st.integers(0, 70), st.integers(0, 100), st.integers(0, 99))
def test_a_restored_stream_goes_on_exactly(num_prompts, before, elsewhere, seed):
    source = stream(num_prompts, seed)
    taken(source, before)
    state = source.state()
    other = stream(num_prompts, seed)
    taken(other, elsewhere)
    other.restore(state)
    assert taken(other, 45) == taken(source, 45)


def test_the_order_of_a_seed_never_changes():
    assert "".join(p.text for p in taken(stream(8, seed=7), 8)) == "43621057"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({"seed": 5}, "seed=0 is not"), ({"num_prompts": 4}, "data.path gives")],
)
def test_a_state_of_another_stream_is_refused(changes, expected):
    with pytest.raises(DataError, match=expected):
        stream(3).restore(stream(3).state() | changes)
