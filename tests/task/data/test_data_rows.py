"""Reading rows of data files, and the errors about files and rows that cannot be used."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from april_rl.config.task import PromptSetConfig
from april_rl.errors import DataError
from april_rl.task.data.rows import RowReader, check_rows
from april_rl.task.data.sources import hub_name, open_source


class ReadRow(NamedTuple):
    prompt: object
    answer: str
    source: str


def load(path, *, key="data.path", columns=(), **settings):
    """Return every row as a data set with these settings reads it."""
    chosen = PromptSetConfig(path=str(path), **settings)
    with TemporaryDirectory() as folder:
        raw = open_source(chosen, key=key, seed=0, folder=Path(folder))
        reader = RowReader(raw, chosen, columns)
        assert len(check_rows(raw, reader)) == len(raw.table)
        rows = reader.rows(raw.table[:], range(len(raw.table)))
        return [ReadRow(*row, raw.names.name(place)) for place, row in enumerate(rows)]


def write(tmp_path, text, name="data.jsonl"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_jsonl_rows_know_their_line_even_after_blank_lines(tmp_path):
    path = write(tmp_path, '\n{"prompt": "a", "answer": "1"}\n\n{"prompt": "b", "answer": "2"}\n')
    rows = load(path)
    assert [(r.prompt, r.answer, r.source) for r in rows] == [
        ("a", "1", f"{path}:2"),
        ("b", "2", f"{path}:4"),
    ]


def test_a_json_array_is_read_and_its_rows_are_counted(tmp_path):
    path = write(tmp_path, json.dumps([{"prompt": "a", "answer": "x"}] * 2, indent=1), "a.json")
    assert [row.source for row in load(path)] == [f"{path} row 1", f"{path} row 2"]


def test_parquet_structs_are_read_by_dotted_names(tmp_path):
    path = tmp_path / "data.parquet"
    messages = [{"role": "user", "content": "1 + 1?"}]
    rows = [{"prompt": messages, "reward_model": {"ground_truth": "2", "style": "rule"}}] * 2
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    row = load(path, answer_column="reward_model.ground_truth")[1]
    assert (row.prompt, row.answer, row.source) == (tuple(messages), "2", f"{path} row 2")


@pytest.mark.parametrize("kind", [pyarrow.float16(), pyarrow.float32(), pyarrow.float64()])
@pytest.mark.parametrize("form", ["number", "struct", "list", "list in a struct"])
def test_a_decimal_of_a_short_type_is_read_as_it_was_written(tmp_path, kind, form):
    """Fails when the gold answer to 0.1 becomes 0.10000000149011612."""
    texts = ["0.1", "-2.3", "0.001", "16", "6.1e-05"]
    values = pyarrow.array([np.array(text, dtype=kind.to_pandas_dtype())[()] for text in texts])
    if form.startswith("list"):
        values = pyarrow.ListArray.from_arrays(range(len(texts) + 1), values)
    if form.endswith("struct"):
        values = pyarrow.StructArray.from_arrays([values], ["gold"])
    table = pyarrow.table({"prompt": texts, "answer": values})
    pyarrow.parquet.write_table(table, tmp_path / "data.parquet")
    column = "answer.gold" if form.endswith("struct") else "answer"
    rows = load(tmp_path / "data.parquet", answer_column=column)
    assert [row.answer for row in rows] == texts


def test_a_file_leaves_no_cache_behind(tmp_path):
    path = write(tmp_path, '{"prompt": "a", "answer": "1"}\n')
    load(path)
    path.write_text('{"prompt": "b", "answer": "1"}\n')
    assert [row.prompt for row in load(path)] == ["b"]


def test_the_last_match_of_the_answer_pattern_is_the_answer(tmp_path):
    answer = "2 + 2 = 4\n#### 4\nno:\n#### 5 "
    path = write(tmp_path, json.dumps({"prompt": "a", "answer": answer}))
    assert [row.answer for row in load(path, answer_pattern=r"####\s*(.+)")] == ["5"]


def test_an_answer_pattern_without_a_match_names_row_value_and_number_of_rows(tmp_path):
    answers = ["#### 1", "nothing", "#### 3", "nor here"]
    path = write(tmp_path, "\n".join(json.dumps({"prompt": "a", "answer": a}) for a in answers))
    expected = r":2: data\.answer_pattern=#+\(.*\) finds nothing.*'nothing' \(in 2 of 4 rows\)"
    with pytest.raises(DataError, match=expected):
        load(path, answer_pattern="####(.+)")


def test_the_prompt_pattern_extracts_the_question_from_text_and_from_the_last_message(tmp_path):
    text = "Solve this.\n\nWhat is 1 + 1?\n\nRemember the box."
    messages = [{"role": "system", "content": text}, {"role": "user", "content": text}]
    pattern = r"(?s)this\.\s+(.+?)\s+Remember"
    path = write(tmp_path, json.dumps({"prompt": text, "answer": 2}))
    assert load(path, prompt_pattern=pattern)[0].prompt == "What is 1 + 1?"
    path = write(tmp_path, json.dumps({"prompt": messages, "answer": 2}))
    system, user = load(path, prompt_pattern=pattern)[0].prompt
    assert (system["content"], user["content"]) == (text, "What is 1 + 1?")
    with pytest.raises(DataError, match=r":1: data\.prompt_pattern=.*finds nothing.*Solve this"):
        load(path, prompt_pattern="(?s)Answer: (.+)")


def test_a_missing_extra_column_is_named(tmp_path):
    path = write(tmp_path, '{"prompt": "a", "answer": "1", "level": 3}')
    load(path, columns=["level"])
    with pytest.raises(DataError, match="no column tests, which the reward needs; the columns "):
        load(path, columns=["level", "tests"])


BAD_FILES = {
    "syntax": ('{"prompt": "a", "answer": "1"}\n{"prompt": "b" "answer": "2"}\n', r":2: not valid"),
    "broken array": ('[{"prompt": "a",\n "answer": 1},\n oops]', r":3: not valid JSON"),
    "half a character": ('{"prompt": "a", "answer": 1}\n{"prompt": "\\ud800"}', r":2: has half"),
    "not an object": ('{"prompt": "a", "answer": "1"}\n5\n', r":2: every line must be a JSON obj"),
    "empty": ("", "the file is empty"),
    "blank": ("\n\n", "has no rows"),
    "empty array": ("[]", "has no rows"),
    "no column": ('{"question": "a", "answer": "1"}', "prompt_column=prompt; .*question, answer"),
    "NaN": (
        '{"prompt": "a", "answer": 1}\n{"prompt": "b", "answer": NaN}',
        r":2: .*in 1 of 2 rows",
    ),
    "NaN among text": (
        '{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": NaN}',
        r":2: .*in 1 of 2 rows",
    ),
    "null": (
        '{"prompt": "a", "answer": null}\n' * 3 + '{"prompt": "b", "answer": 1}',
        r":1: .*3 of",
    ),
    "empty answers": (
        '{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": ""}\n'
        '{"prompt": "c", "answer": " "}',
        r":2: data\.answer_column=answer is .*empty.*in 2 of 3 rows",
    ),
    "missing": ('{"prompt": "a", "answer": "1"}\n\n{"prompt": "b"}', r":3: data.answer_column=ans"),
    "null prompt": ('{"prompt": null, "answer": "1"}\n{"prompt": "b", "answer": "1"}', r":1: data"),
    "list": (
        '{"prompt": "a", "answer": ["1"]}\n{"prompt": "a", "answer": ["1", "2"]}',
        r":2: .*must be text, a number or a list with one of.*got list",
    ),
    "boolean": ('{"prompt": "a", "answer": true}', r":1: .*must be text, a number or .*got bool"),
    "struct": ('{"prompt": {"x": "a"}, "answer": "1"}', r":1: .*list of messages.*got dict"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_cannot_be_used_gives_one_message_with_key_or_line(tmp_path, name, caplog):
    text, expected = BAD_FILES[name]
    path = write(tmp_path, text)
    with pytest.raises(DataError, match=expected) as error:
        load(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert not caplog.records


def test_a_wrong_name_inside_a_struct_lists_the_existing_names(tmp_path):
    path = write(tmp_path, '{"prompt": "a", "reward": {"truth": "1"}}')
    with pytest.raises(DataError, match=r"data\.jsonl has .*answer_column=reward\.gold.*are truth"):
        load(path, answer_column="reward.gold")


@pytest.mark.parametrize(
    "values",
    [
        pyarrow.array([0, 1], pyarrow.timestamp("s")),
        pyarrow.array([b"a", b"b"]),
        pyarrow.array(
            [{"when": [0]}, {"when": [1]}],
            pyarrow.struct({"when": pyarrow.list_(pyarrow.date32())}),
        ),
    ],
    ids=["timestamp", "binary", "nested"],
)
def test_a_column_that_cannot_be_saved_in_a_checkpoint_is_refused_by_name(tmp_path, values):
    """Only if the reward needs it. Fails when the run only finds out at its first checkpoint."""
    table = pyarrow.table({"prompt": ["a", "b"], "answer": ["1", "2"], "extra": values})
    pyarrow.parquet.write_table(table, tmp_path / "data.parquet")
    load(tmp_path / "data.parquet")
    with pytest.raises(DataError, match=r"needs column extra, whose values are .*as text"):
        load(tmp_path / "data.parquet", columns=("extra",))


@pytest.mark.parametrize("number", [1, 3])
def test_a_line_that_is_not_utf_8_is_named(tmp_path, number):
    """Fails when the bytes are first decoded where rows become Python values."""
    lines = [b'{"prompt": "a", "answer": "1"}\n'] * 4
    lines[number - 1] = '{"prompt": "ä", "answer": "1"}\n'.encode("latin-1")
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"".join(lines))
    with pytest.raises(DataError, match=rf"{path}:{number}: not UTF-8: .*0xe4 at byte 13 of"):
        load(path)


BAD_FOR_A_SET = {
    "absent.jsonl": (None, "No such file"),
    "empty.jsonl": ("", "the file is empty"),
    "syntax.jsonl": ("{", r":1: not valid JSON"),
    "column.jsonl": ('{"question": "a", "answer": "1"}', "prompt_column=prompt"),
    "text.parquet": ("this is text", r"corrupted.*file\.$"),
    "data.csv": ("a,b", r"must end in \.jsonl, \.json, \.parquet"),
}


@pytest.mark.parametrize("name", BAD_FOR_A_SET)
@pytest.mark.parametrize("key", ["data.path", "evaluation.sets.test"])
def test_a_file_is_named_with_the_key_of_its_set(tmp_path, name, key):
    path, (text, reason) = tmp_path / name, BAD_FOR_A_SET[name]
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=rf"^{key}={path}.*{reason}") as error:
        load(path, key=key)
    assert ("data.path" in str(error.value)) == (key == "data.path")


@pytest.mark.slow
def test_a_data_set_id_without_network_gives_one_message(tmp_path):
    program = (
        "from april_rl.errors import DataError\n"
        "from april_rl.task.data.sources import load_id\n"
        "try: load_id('nobody/nothing', key='data.path', split='train')\n"
        "except DataError as error: print(error)\n"
    )
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=offline, capture_output=True, text=True, check=True
    )
    assert ran.stdout.startswith("data.path=nobody/nothing (data.split=train): neither")
    assert ran.stderr == ""


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("openai/gsm8k:main", ("openai/gsm8k", "main")),
        ("HuggingFaceH4/MATH-500", ("HuggingFaceH4/MATH-500", None)),
        ("squad", ("squad", None)),
    ],
)
def test_the_configuration_of_a_data_set_follows_a_colon(path, named):
    assert hub_name(path) == named


def test_a_folder_with_a_colon_in_its_name_is_taken_as_a_whole(tmp_path):
    folder = tmp_path / "run 12:30"
    folder.mkdir()
    assert hub_name(str(folder)) == (str(folder), None)


def test_one_configuration_of_a_data_set_with_several_is_loaded(tmp_path, monkeypatch):
    """GSM8K is published in this way: without a configuration the library refuses to choose."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "openai" / "gsm8k"
    folder.mkdir(parents=True)
    listed = ""
    for name in ("main", "socratic"):
        write(folder, f'{{"prompt": "{name}", "answer": "1"}}\n', f"{name}.jsonl")
        listed += f"- {{config_name: {name}, data_files: [{{split: train, path: {name}.jsonl}}]}}\n"
    (folder / "README.md").write_text(f"---\nconfigs:\n{listed}---\n")
    with pytest.raises(DataError, match="openai/gsm8k:main or openai/gsm8k:socratic"):
        load("openai/gsm8k")
    assert [row.prompt for row in load("openai/gsm8k:main")] == ["main"]
