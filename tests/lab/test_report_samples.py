"""The samples in the report: which are shown, and how scored and trained ones are counted."""

from dataclasses import replace
from pathlib import Path

import pytest
from report_page import Page
from report_runs import make_run

from april_rl.lab.report.advisories import advisories
from april_rl.lab.report.report import head_figures, write_report
from april_rl.lab.report.run_files import RunFiles, read_run
from april_rl.lab.report.sample_blocks import sample_blocks


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def run(run_dir: Path) -> RunFiles:
    return read_run(run_dir)


@pytest.fixture(scope="module")
def page(run_dir: Path) -> Page:
    return Page(write_report(run_dir).path.read_text())


def test_the_page_shows_samples_of_the_first_and_last_step_with_their_rewards(
    page: Page, tmp_path: Path
) -> None:
    """Each sample appears once, even in a run of one step."""
    for step in (1, 6):
        assert page.text.count(f"Samples of step {step}") == 1
        shown = page.text.partition(f"Samples of step {step}")[2].partition("Samples of")[0]
        assert shown.count("reward 0.00") + shown.count("reward 1.00") == 12
        best = shown.partition("The best rewarded")[2].partition("The worst rewarded")[0]
        assert best.count("reward 1.00") == 4
    short = make_run(tmp_path / "run", num_steps=1)
    assert write_report(short).path.read_text().count("Samples of step 1") == 1


def test_the_interval_of_the_reward_begins_at_the_fifth_point(page: Page) -> None:
    """Fails when it has no width at the first step, where least is known."""
    rows = page.specs["reward"]["data"]["values"]
    assert [row["low"] is None for row in rows] == [True] * 4 + [False] * (len(rows) - 4)
    assert all(row["low"] < row["mean"] < row["high"] for row in rows[4:])
    band, *_, marks = page.specs["reward"]["layer"]
    assert band["transform"] == [{"filter": "isValid(datum.low)"}]
    assert marks["mark"]["opacity"] > 0.8
    assert marks["mark"]["size"] > 30


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
