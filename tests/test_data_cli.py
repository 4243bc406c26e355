"""`python -m april_rl data` shows a set as a run would use it, and writes what is clean of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from april_rl.commands import data
from april_rl.rehearsal import stand_ins

GSM8K = str(stand_ins.rows("openai/gsm8k:main"))
COLUMNS = ("data.prompt_column=question", r'data.answer_pattern="####\s*(.+)"')


@pytest.mark.slow
def test_a_set_is_shown_and_written_without_what_evaluation_has(tmp_path, monkeypatch, capsys):
    """The fourth question is in the evaluation set too, with other words around it."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = [json.loads(line) for line in Path(GSM8K).read_text(encoding="utf-8").splitlines()]
    train, held_out, clean = (tmp_path / name for name in ("train.jsonl", "test.jsonl", "clean"))
    twice = [*rows, rows[0]]
    train.write_text("".join(json.dumps(row) + "\n" for row in twice))
    held_out.write_text(json.dumps({**rows[4], "question": f"Hm. {rows[4]['question']}"}) + "\n")
    chosen = f"evaluation.sets.test={{path: {held_out}}}"
    status = data.main([str(train), *COLUMNS, chosen, f"write={clean}"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert f"{len(twice)} rows, 1 duplicates" in printed
    assert "test: 1 prompts share 13 words with 1 of its 1" in printed
    assert "reward of a right answer" in printed
    written = [json.loads(line) for line in clean.read_text().splitlines()]
    assert [row["answer"] for row in written] == ["8", "150", "150", "780", "60"]


def test_a_missing_file_ends_in_one_message(capsys):
    assert data.main(["absent.jsonl", "model.path=absent"]) == 1
    assert capsys.readouterr().err.startswith("error: ")
