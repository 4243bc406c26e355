"""Tokens around a prompt: the start token, and the tokens that end a turn."""

import json

import pytest
from byte_tokenizer import END, hf_byte_tokenizer
from tokenizers import AddedToken, processors
from word_tokenizer import CHAT, WORDS, hf_tokenizer, words

from april_rl.config import to_config
from april_rl.config.prompt_sets import has_chat
from april_rl.config.store import compose_overrides
from april_rl.config.task import DataConfig, EvaluationSetConfig, PromptSetConfig, SourceConfig
from april_rl.errors import DataError
from april_rl.start.assembly import workers
from april_rl.start.planning.layout import settle
from april_rl.start.planning.sizes import Sizes
from april_rl.task.data.prompts import load_prompts
from april_rl.task.data.stop_tokens import stop_token_ids
from april_rl.task.data.tokenizer import Tokenizer

MUTE = CHAT.replace("{% if add_generation_prompt %}assistant{% endif %}", "")


def read_tokens(tmp_path, prompt, backend, **settings):
    """Return the tokens of one prompt as words."""
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": prompt, "answer": "1"}))
    chosen = PromptSetConfig(path=str(path), **settings)
    tokenizer = Tokenizer(backend, path="models/words")
    (read,) = load_prompts(chosen, tokenizer, key="data.path", max_prompt_tokens=99)
    return words(read.token_ids)


def with_tokens(single):
    """Return a tokenizer that puts these tokens around a text ($A)."""
    tokenizer = hf_tokenizer()
    names = [word for word in ("<bos>", "<eos>", "system") if word in single]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(name, WORDS.index(name)) for name in names]
    )
    return tokenizer


@pytest.mark.parametrize("template", ["<bos> Q: {prompt} A:", "Q: {prompt} A:"])
def test_a_plain_prompt_begins_with_one_start_token(tmp_path, template):
    settings = {"template": template}
    assert read_tokens(tmp_path, "one", hf_tokenizer(), **settings) == "<bos> Q: one A:"
    twice = "<bos> <bos> Q: one A:"
    assert read_tokens(tmp_path, "<bos> <bos> Q: one A:", hf_tokenizer(), template="plain") == twice


def test_several_start_tokens_are_not_doubled_either(tmp_path):
    backend = with_tokens("<bos> system $A")
    found = read_tokens(tmp_path, "<bos> system one", backend, template="plain")
    assert found == "<bos> system one"


PLAIN = {"template": "plain"}
CLOSED = {
    "a plain template": (hf_tokenizer, {"template": "{prompt} <eos>"}),
    "a tokenizer that adds it": (lambda: with_tokens("<bos> $A <eos>"), PLAIN),
    "a chat template": (lambda: hf_tokenizer(MUTE), {}),
}


@pytest.mark.parametrize("kind", CLOSED)
def test_a_prompt_that_ends_with_an_end_token_is_refused(tmp_path, kind):
    make, settings = CLOSED[kind]
    remedy = "add_generation_prompt" if kind == "a chat template" else "data.template"
    expected = rf"data\.jsonl:1: the prompt ends with the end token <eos>.*{remedy}"
    with pytest.raises(DataError, match=expected):
        read_tokens(tmp_path, "one", make(), **settings)


def test_a_question_with_an_end_token_is_refused_under_a_chat_template(tmp_path):
    rendered = "user one <eos> assistant"
    with pytest.raises(DataError, match=r"data\.jsonl:1: the prompt holds the control token <eos>"):
        read_tokens(tmp_path, rendered, hf_tokenizer())
    assert rendered in read_tokens(tmp_path, rendered, hf_tokenizer(), **PLAIN)


def test_a_prompt_that_an_environment_continues_may_end_its_turn(tmp_path):
    assert read_tokens(tmp_path, "one", hf_tokenizer(), environment=True) == "user one <eos>"


def write(tmp_path, *, named, chat_template=None):
    """Write the tokenizer of a base model, whose end-of-text token is not the end of a turn in its
    template.
    """
    tokenizer = hf_byte_tokenizer(chat_template) if chat_template else hf_byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": AddedToken("<|endoftext|>", special=True)})
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer.convert_tokens_to_ids(named)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    ends = tokenizer.convert_tokens_to_ids([END, "<|endoftext|>"])
    return str(tmp_path), dict(zip((END, "<|endoftext|>"), ends, strict=True))


@pytest.mark.parametrize("template", ["chat", "plain"])
def test_the_engines_of_a_run_with_chat_get_the_token_that_ends_a_turn(
    tmp_path, monkeypatch, template
):
    path, ids = write(tmp_path, named=["<|endoftext|>"])
    set_to = [f"model.path={path}", f"data.template={template}", "evaluation.sets.held_out=null"]
    composed = compose_overrides(["+recipe=tiny_cpu", "runtime.threads=1", *set_to])
    config, layout = settle(to_config(composed), gpus=0, where="this machine")
    given = {}
    monkeypatch.setattr(workers, "RayWorkers", lambda _, **settings: given.update(settings))
    workers.build_workers(config, layout, run_dir=tmp_path, sizes=Sizes(1, 1, 1))
    ends = {"chat": sorted(ids.values()), "plain": [ids["<|endoftext|>"]]}
    assert [*given["settings"].stop_tokens] == ends[template]


def test_a_chat_model_keeps_its_own_end_tokens(tmp_path):
    path, ids = write(tmp_path, named=[END])
    assert stop_token_ids(path, is_chat=True) == [ids[END]]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{% if loop.last and not add_generation_prompt %}"
        "<|endoftext|>{% else %}<|im_end|>{% endif %}{% endfor %}",
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    ],
    ids=["ends of parts", "no special tokens"],
)
def test_a_token_that_does_not_end_the_last_turn_is_no_end(tmp_path, template):
    """gpt-oss is an example: parts of a turn end with a token that does not end the turn."""
    path, ids = write(tmp_path, named=["<|endoftext|>"], chat_template=template)
    assert stop_token_ids(path, is_chat=True) == [ids["<|endoftext|>"]]


def test_a_run_has_chat_when_one_of_its_data_sets_uses_a_chat_template():
    plain, chat = "plain", "chat"
    assert has_chat(DataConfig(path="x"), {})
    assert not has_chat(DataConfig(path="x", template=plain), {})
    held_out = {"a": EvaluationSetConfig(path="y", template=chat)}
    assert has_chat(DataConfig(path="x", template=plain), held_out)
    sources = {"a": SourceConfig(path="y", template=plain)}
    assert not has_chat(DataConfig(path="", sources=sources), {})
