"""Values of a JSON file are read as they are written, whatever else their column contains."""

import json

import pytest
from word_tokenizer import hf_tokenizer

from april_rl.config.task import PromptSetConfig
from april_rl.errors import DataError
from april_rl.task.data import json_rows
from april_rl.task.data.prompts import load_prompts
from april_rl.task.data.tokenizer import Tokenizer


def load(path, **settings):
    tokenizer = Tokenizer(hf_tokenizer(), path="models/words")
    columns = settings.pop("columns", ())
    chosen = PromptSetConfig(path=str(path), template="plain", **settings)
    return load_prompts(chosen, tokenizer, key="data.path", max_prompt_tokens=99, columns=columns)


def write(tmp_path, *values, name="data.jsonl"):
    """Write a file with a row for each value, which is given as JSON text: its answer and its
    level.
    """
    path = tmp_path / name
    rows = [
        f'{{"prompt": "one {n}", "answer": {value}, "gold": "1", "level": {value}}}'
        for n, value in enumerate(values)
    ]
    text = f"[{', '.join(rows)}]" if name.endswith(".json") else "\n".join(rows)
    path.write_text(text, encoding="utf-8")
    return path


ANSWERS = {
    "dates": ['"2024-01-05"', '"2023-11-30"'],
    "times": ['"2024-01-05T10:00:00Z"', '"2024-01-05 10:00:00"'],
    "times of a day": ['"10:30"', '"10:30:15"'],
    "a large number beside a decimal": ["9007199254740993", "0.5"],
    "large numbers": ["123456789012345678901234567890", "-98765432109876543210"],
    "the largest of a table and more": ["9223372036854775807", "9223372036854775808"],
    "digits that a float does not keep": ["0.12345678901234567890", "2.5"],
    "numbers beside text": ["42", '"x^2"', "0.12345678901234568"],
    "text that is JSON beside numbers": ["1", '"007"', '"2.50"', '"null"'],
    "beyond floats": ["1e999", "1.5"],
    "as one writes them": ["0.1", "-3.25", "1e-07"],
}


@pytest.mark.parametrize("name", ["data.jsonl", "data.json"])
@pytest.mark.parametrize("kind", ANSWERS)
def test_answers_are_read_as_written(kind, name, tmp_path):
    values = ANSWERS[kind]
    found = [prompt.answer for prompt in load(write(tmp_path, *values, name=name))]
    assert found == [value.strip('"') for value in values]


def test_whole_numbers_in_a_struct_keep_their_digits_too(tmp_path):
    path = write(tmp_path, '{"gold": 9007199254740993}', '{"gold": 0.5}')
    answers = [prompt.answer for prompt in load(path, answer_column="answer.gold")]
    assert answers == ["9007199254740993", "0.5"]


def test_a_large_power_of_ten_gets_no_invented_digits(tmp_path):
    assert load(write(tmp_path, "1e30"))[0].answer == "1e+30"
    assert load(write(tmp_path, "27.0"))[0].answer == "27"


@pytest.mark.parametrize("chunk", [1, 2**24])
def test_columns_for_the_reward_keep_their_types(tmp_path, monkeypatch, chunk):
    """Even where a later part of the file has other types. Fails when a text becomes a number, or a
    float loses digits.
    """
    monkeypatch.setattr(json_rows, "_CHUNK_CHARACTERS", chunk)
    values = [1, "42", 0.12345678901234568, ["2024-01-05", None], {"a": 1.5}, {"a": "x"}, None]
    path = write(tmp_path, *map(json.dumps, values))
    read = load(path, answer_column="gold", columns=["level"])
    assert [prompt.columns["level"] for prompt in read] == values


def test_columns_that_appear_or_widen_late_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(json_rows, "_CHUNK_CHARACTERS", 1)
    rows = [{"prompt": "one", "answer": 1}, {"prompt": "two", "answer": 0.5, "extra": {"a": 1}}]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = load(path, columns=["extra"])
    assert [(p.answer, p.columns["extra"]) for p in table] == [("1", None), ("0.5", {"a": 1})]


def test_a_file_that_looks_like_an_agents_trace_is_a_data_set(tmp_path):
    """The library's own reader replaces the columns of such files."""
    row = {"type": "math", "message": "one", "payload": {"a": 1}, "answer": "2"}
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps({**row, "payload": {"a": "x"}}) + "\n")
    assert load(path, prompt_column="message")[0].answer == "2"


def test_a_list_of_lists_says_what_is_expected(tmp_path):
    """Open-Reasoner-Zero publishes its rows in this form."""
    path = tmp_path / "orz.json"
    path.write_text(json.dumps([[{"from": "human", "value": "one"}]]))
    with pytest.raises(
        DataError, match=r"orz\.json: row 1 must be a JSON object.*got list \[\{'fr"
    ):
        load(path)


def test_objects_over_several_lines_are_rows(tmp_path):
    path = tmp_path / "data.json"
    rows = [{"prompt": "one", "answer": 1}, {"prompt": "two", "answer": 2}]
    path.write_text("\n".join(json.dumps(row, indent=1) for row in rows))
    assert [prompt.answer for prompt in load(path)] == ["1", "2"]
