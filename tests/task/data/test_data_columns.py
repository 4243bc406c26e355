"""Values at a dotted path, and answers that are lists."""

import json

import pytest
from word_tokenizer import hf_tokenizer

from april_rl.config.task import PromptSetConfig
from april_rl.errors import DataError
from april_rl.task.data.prompts import load_prompts
from april_rl.task.data.tokenizer import Tokenizer


def answers(tmp_path, *rows, **settings):
    """Return the answers of a file with these rows."""
    path = tmp_path / "data.jsonl"
    texts = [json.dumps({"prompt": f"one {n}", **row}) for n, row in enumerate(rows)]
    path.write_text("\n".join(texts))
    tokenizer = Tokenizer(hf_tokenizer(), path="models/words")
    chosen = PromptSetConfig(path=str(path), template="plain", **settings)
    table = load_prompts(chosen, tokenizer, key="data.path", max_prompt_tokens=99)
    return [prompt.answer for prompt in table]


def test_a_path_reaches_into_json_text(tmp_path):
    rows = [{"extra": json.dumps({"gold": {"answer": n}})} for n in (1, 2.5)]
    assert answers(tmp_path, *rows, answer_column="extra.gold.answer") == ["1", "2.5"]


BAD_PATHS = {
    "text": ("the answer", r":1: .*through extra, which is text, not JSON"),
    "a number in text": ("42", r":1: .*through extra, which is int 42, not a struct"),
    "a list": ([{"answer": 1}], "through extra, which is a list; a path"),
    "a list in text": ("[1]", r":1: .*through extra, which is list \[1\], not a struct"),
    "another struct": ({"answer": 1}, "no 'gold'; the fields are answer"),
    "no such field": ("{}", r":1: .*extra.gold.answer is missing"),
}


@pytest.mark.parametrize("kind", BAD_PATHS)
def test_a_path_through_a_value_without_fields_says_so(tmp_path, kind):
    value, expected = BAD_PATHS[kind]
    with pytest.raises(DataError, match=expected):
        answers(tmp_path, {"extra": value}, answer_column="extra.gold.answer")


def test_a_list_of_equal_answers_is_that_answer(tmp_path):
    """Skywork-OR1 has them: its ground_truth is the JSON text of a list."""
    golds = ['["12\\\\text{ cm}"]', '["7", " 7"]', ["7", "7"], [3], "[1, 4]", '["x", 1]', "[x]"]
    rows = [{"reward_model": {"ground_truth": gold}} for gold in golds]
    found = answers(tmp_path, *rows, answer_column="reward_model.ground_truth")
    assert found == ["12\\text{ cm}", "7", "7", "3", "[1, 4]", '["x", 1]', "[x]"]


@pytest.mark.parametrize("gold", ['["1", "2"]', ["1", "2"], '[""]', []])
def test_a_list_of_several_answers_or_none_is_refused(tmp_path, gold):
    with pytest.raises(DataError, match=r"data\.jsonl:2: data\.answer_column=answer"):
        answers(tmp_path, {"answer": ["7"]}, {"answer": gold})


def test_a_pattern_reads_the_text_of_the_whole_list(tmp_path):
    rows = [{"answer": '["1", "2"]'}]
    assert answers(tmp_path, *rows, answer_pattern="(?s)(.+)") == ['["1", "2"]']
