"""report.html of a short run: its samples, and an interval only if there are enough points."""

from pathlib import Path

import pytest
from report_page import Page
from report_runs import make_run

from april_rl.lab.report.report import write_report


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    run_dir = make_run(tmp_path_factory.mktemp("runs") / "run", num_steps=6)
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
