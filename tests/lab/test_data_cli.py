"""`python -m april_rl data` shows a data set as a run would use it, and writes a clean
copy of it.
"""

import json
from pathlib import Path

import pytest
from datasets import Dataset
from word_tokenizer import CHAT, hf_tokenizer, words

from april_rl.__main__ import main
from april_rl.config.task import PromptSetConfig
from april_rl.lab.rehearsal import stand_ins
from april_rl.task.data.prompts import load_prompts
from april_rl.task.data.tokenizer import Tokenizer, load_tokenizer

GSM8K = str(stand_ins.rows("openai/gsm8k:main"))
COLUMNS = ("data.prompt_column=question", r'data.answer_pattern="####\s*(.+)"')


@pytest.mark.slow
def test_a_data_set_is_shown_and_written_without_evaluation_questions(
    tmp_path, monkeypatch, capsys
):
    """The fourth question is also in the evaluation set, with other words around it."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = [json.loads(line) for line in Path(GSM8K).read_text(encoding="utf-8").splitlines()]
    names = ("train.jsonl", "test.jsonl", "clean.jsonl")
    train, held_out, clean = (tmp_path / name for name in names)
    twice = [*rows, rows[0]]
    train.write_text("".join(json.dumps(row) + "\n" for row in twice))
    held_out.write_text(json.dumps({**rows[4], "question": f"Hm. {rows[4]['question']}"}) + "\n")
    chosen = f"evaluation.sets.test={{path: {held_out}}}"
    status = main(["data", str(train), *COLUMNS, chosen, f"write={clean}"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert f"{len(twice)} rows, 1 duplicates" in printed
    assert "test: 1 prompts share 13 words with 1 of its 1" in printed
    assert "reward of a right answer" in printed
    written = [json.loads(line) for line in clean.read_text().splitlines()]
    assert written == [row for place, row in enumerate(rows) if place != 4]


def write_tokenizer(folder: Path) -> Tokenizer:
    """Write a tokenizer that adds a start token to plain text, and whose chat template writes
    one too.
    """
    hf_tokenizer("<bos> " + CHAT).save_pretrained(folder)
    return load_tokenizer(str(folder))


@pytest.mark.slow
@pytest.mark.parametrize(("suffix", "instruction"), [(".jsonl", "three"), (".parquet", None)])
def test_the_written_file_gives_the_same_tokens_with_the_same_settings(
    tmp_path, capsys, instruction, suffix
):
    """Fails when rendered prompts are written, which get a second start token and instruction, or a
    column is lost.
    """
    tokenizer = write_tokenizer(tmp_path / "model")
    rows = [
        {"prompt": text, "gold": {"value": n + 0.5}, "tests": ["1", 2]}
        for n, text in enumerate(("one two", "one", "one two", "two two"))
    ]
    source, clean = tmp_path / "train.jsonl", tmp_path / f"clean{suffix}"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"answer_column": "gold.value", "instruction": instruction}
    overrides = [f"data.{name}={value or 'null'}" for name, value in settings.items()]
    status = main(
        ["data", str(source), f"model.path={tmp_path / 'model'}", *overrides, f"write={clean}"]
    )
    assert status == 0, capsys.readouterr()
    read = [
        load_prompts(
            PromptSetConfig(path=str(path), **settings),
            tokenizer,
            key="data.path",
            max_prompt_tokens=100,
            columns=["tests"],
        )
        for path in (source, clean)
    ]
    before, after = [[(p.token_ids, p.text, p.answer, p.columns) for p in each] for each in read]
    assert after == before
    assert len(after) == 4, "the answers differ"
    assert words(after[0][0]).split().count("<bos>") == 1


@pytest.mark.slow
def test_each_source_of_a_mixture_is_written_to_its_own_file(tmp_path, capsys):
    write_tokenizer(tmp_path / "model")
    sources = []
    for name, column in (("a", "question"), ("b", "prompt")):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps({column: f"one {name}", "answer": "1"}) + "\n")
        sources.append(f"{name}: {{path: {path}, prompt_column: {column}}}")
    arguments = [
        f"data.sources={{{', '.join(sources)}}}",
        *("data.path=''", f"model.path={tmp_path / 'model'}", f"write={tmp_path / 'new.jsonl'}"),
    ]
    assert main(["data", *arguments]) == 0, capsys.readouterr()
    for name in ("a", "b"):
        assert (tmp_path / f"new.{name}.jsonl").read_text() == (
            tmp_path / f"{name}.jsonl"
        ).read_text()
    assert f"data.sources.a.path={tmp_path / 'new.a.jsonl'}" in capsys.readouterr().out


@pytest.mark.slow
def test_rows_that_json_would_change_are_refused_with_the_remedy(tmp_path, capsys):
    """Fails when a value that JSON cannot represent is written in another form."""
    write_tokenizer(tmp_path / "model")
    source = tmp_path / "typed.parquet"
    rows = {"prompt": ["one"], "answer": ["2026-11-24 04:00:00"], "level": [float("nan")]}
    Dataset.from_dict(rows).to_parquet(str(source))
    arguments = [str(source), f"model.path={tmp_path / 'model'}", "reward.function=exact"]
    assert main(["data", *arguments, f"write={tmp_path / 'new.jsonl'}"]) == 1
    assert f"write={tmp_path / 'new.parquet'}" in capsys.readouterr().err
    assert not list(tmp_path.glob("*new*")), "the refused file is left behind"
    assert main(["data", *arguments, f"write={tmp_path / 'new.parquet'}"]) == 0


def test_a_file_that_could_not_be_read_again_is_refused_at_once(capsys):
    assert main(["data", "absent.jsonl", "write=clean.txt"]) == 2
    assert "must end in .jsonl or .parquet" in capsys.readouterr().err


def test_a_missing_file_ends_in_one_message(capsys):
    assert main(["data", "absent.jsonl", "model.path=absent"]) == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.slow
def test_every_row_whose_tests_check_nothing_is_counted_and_named(tmp_path, capsys):
    """Fails when no test of a shown data set is tried, or only as many as at the start of a run."""
    path, good = tmp_path / "tasks.jsonl", "assert double(2) == 4"
    rows = [{"prompt": f"{n}?", "answer": "1", "tests": good} for n in range(20)]
    idle = (
        "def verify():\n    assert double(2) == 4\n",
        "assert (double(2) == 5, 'double')",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n"
        "        self.assertTrue(double(2), 5)\n",
        "try:\n    assert double(2) == 5\nexcept AssertionError:\n    print('wrong')",
    )
    for number, tests in enumerate(idle, start=16):
        rows[number]["tests"] = tests
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_tokenizer(tmp_path / "model")
    arguments = [
        str(path),
        "reward.function=code",
        "reward.args={sandbox: none}",
        f"model.path={tmp_path / 'model'}",
    ]
    assert main(["data", *arguments]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: 4 of 20 rows have tests that do not show"), message
    assert f"{path}:17: reward.function=code raised ValueError: the tests of a task have" in message
    rows = [{**row, "tests": good} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["data", *arguments]) == 0
