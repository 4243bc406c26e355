"""The counts of trained and scored samples in the report."""

from dataclasses import replace

import pytest
from report_runs import make_run

from april_rl.lab.report.advisories import advisories
from april_rl.lab.report.report import head_figures
from april_rl.lab.report.run_files import RunFiles, read_run
from april_rl.lab.report.sample_blocks import sample_blocks


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    return read_run(make_run(tmp_path_factory.mktemp("runs") / "run"))


def test_the_share_of_failed_rewards_is_relative_to_the_scored_samples(run: RunFiles) -> None:
    """Nine of ten groups are rejected, and 10 of 960 samples fail. Fails when the share is relative
    to the few trained samples, so that the advice appears.
    """
    rows = [row | {"ledger/rejected": 9 * row["ledger/trained"]} for row in run.steps]
    rows[-1]["reward/errors"] = 10.0
    assert "The reward failed" not in "\n".join(advisories(replace(run, rows=rows), None))
    rows[-1]["reward/errors"] = 100.0
    assert "The reward failed on" in "\n".join(advisories(replace(run, rows=rows), None))


def test_samples_per_second_count_what_was_trained(run: RunFiles) -> None:
    """One step is skipped and one has half the size. Fails when every step counts N·G samples."""
    rows = [dict(row) for row in run.rows]
    rows[2]["loss/bad_step"] = 1.0
    for row in rows[4:]:
        row["ledger/trained"] -= 2
    found = replace(run, rows=rows)
    assert found.trained_samples == [0, 16, 0, 16, 8, 16, 16]
    figures = {label: value for label, value, _ in head_figures(found)}
    assert figures["trained samples/s"] == f"{72 / run.total('time/step_s'):.1f}"
    assert replace(run, rows=rows[5:]).trained_samples == [16, 16], "of a run resumed elsewhere"


@pytest.mark.parametrize("num_pieces", [1, 50, 4000])
@pytest.mark.parametrize("has_turns", [True, False])
def test_a_sample_takes_little_room_however_many_pieces_it_has(num_pieces, has_turns) -> None:
    text = "some words " * 20_000
    length = len(text) // num_pieces
    sample = {
        "prompt": "question",
        "answer": "42",
        "response": "" if has_turns else text,
        "conversation": [("policy", text[:length])] * num_pieces if has_turns else [],
        "ages": [(0, 10)] * num_pieces,
        "ends": [] if has_turns else [length * (n + 1) for n in range(num_pieces)],
        "reward": 1.0,
        "reward_parts": {},
        "advantage": 0.0,
        "num_tokens": 10 * num_pieces,
        "finish_reason": "stop",
        "prompt_id": 1,
        "index": 0,
    }
    page = sample_blocks([sample])
    assert len(page) < 25_000
    assert (f"[… {num_pieces - 60:,} " in page) == (num_pieces == 4000)
    assert "advantage +0.00, " in page
    assert "advantage" not in sample_blocks([sample | {"advantage": None}])
