"""A run prints lines, and on terminals a panel below them, at two widths."""

import io
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from clock import Clock
from rich.console import Console
from small_tracker import make_record

from april_rl.run.tracking import figures
from april_rl.run.tracking.terminal import View, can_redraw, sparkline

VALUES = {
    "reward/mean": 0.4125,
    "rollout/response_tokens_mean": 1431.0,
    "staleness/age_mean": 0.42,
    "staleness/off_policy_token_frac": 0.31,
    "mismatch/logprob_abs_mean": 0.00123,
    "rollout/generated_tokens_per_s": 18203.0,
    "time/step_s": 6.31,
    "rollout/truncated_frac": 0.034,
}
SHOWN = ["0.412", "1.4k", "0.42", "31%", "0.0012", "18.2k", "6.3"]
BARS = "▁▂▃▄▅▆▇█"
RECORD = make_record(response="first line\nsecond line")
EVALUATION = {"eval/held_out/avg_at_k": 0.625, "eval/held_out/pass_at_k": 0.75}


@contextmanager
def view_of_terminal(width: int, clock: Clock | None = None) -> Iterator[tuple[View, Console]]:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=40)
    title, clock = "trial [1]: 100 steps of 16 groups", clock or Clock()
    view = View(title=title, num_steps=100, terminal=console, clock=clock)
    try:
        yield view, console
    finally:
        view.close()


def view_of_log(**changes: float) -> View:
    return View(title="trial", num_steps=41, **changes)


def panel_text(view: View, width: int) -> str:
    screen = Console(file=io.StringIO(), width=width)
    screen.print(view.panel())
    return screen.file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_the_panel_shows_phase_run_and_curves_within_the_width(width: int) -> None:
    clock = Clock()
    with view_of_terminal(width, clock) as (view, _):
        view.step(0, EVALUATION)
        for step in range(1, 62):
            clock.now_s += 20.0
            view.step(step, VALUES | {"reward/mean": 0.4125 * (step % 2)})
        with view.phase("restoring the checkpoint", 16) as phase:
            phase.advance(11, "18,203 tokens/s")
            text = panel_text(view, width)
    for wanted in ["trial [1]", "restoring the checkpoint", "11/16", "18,203 tokens/s, 0s"]:
        assert wanted in text
    for wanted in ["61/100", "20m20s, 13m00s left", "0.412", "0.034", "held_out avg@k", "0.625"]:
        assert wanted in text
    assert {len(line) for line in text.splitlines()} == {width}
    assert "…" not in text
    (bars,) = re.findall(f"[{BARS}]+", next(line for line in text.splitlines() if "reward" in line))
    assert len(bars) >= 8
    assert bars.endswith("█▁█"), "the newest values are cut off"


@pytest.mark.parametrize("width", [80, 120])
def test_finished_steps_scroll_above_the_live_panel(width: int) -> None:
    with view_of_terminal(width) as (view, console):
        for step in (1, 2):
            view.step(step, VALUES | EVALUATION)
        view.message("saved")
        view.samples(2, [RECORD])
        text = console.file.getvalue()
    assert figures.HEADING in text
    shown = " ".join(re.sub(r"\x1b\[[\d;?]*\w", "", text).split())
    assert shown.count(figures.LEGEND) == 1, "explained once, below the first heading"
    assert shown.index(figures.LEGEND) < shown.index("0.412")
    for step in (1, 2):
        assert figures.step_line(step, VALUES, left_s=60.0)[:-8] in text
    assert "held_out: avg@k 0.625, pass@k 0.750" in text
    assert "saved" in text
    assert "prompt 7, sample 2: reward 1.00, advantage +0.87" in text


def test_a_long_command_can_be_copied_from_a_narrow_terminal() -> None:
    """Fails when a newline before its last word makes another command of it."""
    command = "continue with resume=auto hydra.run.dir=outputs/" + 8 * "a_long_name/"
    with view_of_terminal(80) as (view, console):
        view.message(command)
        assert command in console.file.getvalue()


def test_the_innermost_phase_is_shown_and_then_the_outer_one_again() -> None:
    with view_of_terminal(80) as (view, _), view.phase("rollout", 16):
        with view.phase("evaluating"):
            assert "evaluating" in panel_text(view, 80)
        assert "rollout" in panel_text(view, 80)


def test_plain_output_is_one_aligned_line_per_step_with_a_heading_every_twenty(
    capsys: pytest.CaptureFixture,
) -> None:
    clock = Clock()
    view = view_of_log(clock=clock)
    for step in range(1, 42):
        clock.now_s += 10.0
        with view.phase("rollout", 16):
            view.step(step, VALUES)
    view.close()
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "trial"
    headings = [n for n, line in enumerate(lines) if line == figures.HEADING]
    assert headings == [0, 22, 43]
    assert lines.pop(1) == figures.LEGEND, "explained once, below the first heading"
    assert len(lines) == 41 + 3
    assert {len(line) for line in lines} == {77}
    assert lines[1].split() == ["1", *SHOWN, "4m12s"]


def test_an_evaluation_gets_its_own_line_with_its_intervals(capsys: pytest.CaptureFixture) -> None:
    """Outside training it has no step. Fails when 30 prompts look as certain as 30,000."""
    ends = {"eval/held_out/avg_at_k_low": 0.5, "eval/held_out/avg_at_k_high": 0.7}
    view = view_of_log()
    view.step(0, EVALUATION)
    view.evaluation(1, {**EVALUATION, **ends, "eval/held_out/maj_at_k": 0.7})
    assert capsys.readouterr().out.splitlines() == [
        "trial",
        "     0  held_out: avg@k 0.625, pass@k 0.750",
        "held_out: avg@k 0.625 [0.500, 0.700], pass@k 0.750, maj@k 0.700",
    ]


def test_a_long_phase_gets_one_line_and_a_short_one_gets_none(
    capsys: pytest.CaptureFixture,
) -> None:
    view = view_of_log(patience_s=0.2)
    with view.phase("sync"):
        pass
    with view.phase("rollout", 16) as phase:
        phase.advance(5, "1,200 tokens/s")
        time.sleep(0.5)
    _, *lines = capsys.readouterr().out.splitlines()
    assert lines == ["        rollout: 5 of 16, 1,200 tokens/s, 0s so far"]


def test_a_phase_ends_with_the_error_that_ended_it() -> None:
    view = view_of_log()
    with pytest.raises(RuntimeError, match="stalled"), view.phase("rollout", 16):
        raise RuntimeError("stalled")


def test_missing_values_and_nan_are_shown_as_dashes() -> None:
    line = figures.step_line(1, {"reward/mean": float("nan"), "time/step_s": 2.0}, left_s=5.0)
    assert line.split() == ["1", "-", "-", "-", "-", "-", "-", "2.0", "5s"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (143.4, "143"),
        (999.6, "1.0k"),
        (9800, "9.8k"),
        (123456, "123k"),
        (999_960, "1.0M"),
    ],
)
def test_counts_take_five_characters(value: float, text: str) -> None:
    assert figures.compact(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.6, "1m00s"), (250, "4m10s"), (7500, "2h05m"), (3 * 86400 + 4 * 3600, "3d04h")],
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert figures.duration(seconds) == text


def test_a_sparkline_shows_the_last_values_between_their_minimum_and_maximum() -> None:
    assert sparkline([9, 0, 1, float("nan"), 2], 3) == "▁▅█"
    assert sparkline([3, 3], 8) == "▁▁"
    assert sparkline([], 8) == ""


def test_the_shown_samples_are_the_best_the_worst_and_the_longest_in_progress() -> None:
    records = [
        replace(RECORD, index=0, reward=0.5, ages=((0, 5),)),
        replace(RECORD, index=1, reward=0.0, ages=((0, 5),)),
        replace(RECORD, index=2, reward=1.0, ages=((0, 5),)),
        replace(RECORD, index=3, reward=0.5, ages=((2, 1), (1, 2), (0, 2))),
    ]
    assert [record.index for record in figures.telling(records)] == [2, 1, 3]
    assert figures.telling(records[:1]) == records[:1]


def test_a_sample_is_readable_within_the_width_and_long_texts_lose_their_middle() -> None:
    text = figures.sample_text(3, replace(RECORD, prompt="word " * 500), width=76)
    assert max(map(len, text.splitlines())) <= 76
    assert "[…]" in text
    assert len(text) < 1000
    assert "  response  first line\n            second line\n" in text


def test_a_sample_with_an_environment_is_shown_turn_by_turn() -> None:
    said = (("environment", "guess"), ("policy", "one"), ("environment", "no"), ("policy", "two"))
    lines = figures.sample_text(3, replace(RECORD, conversation=said), width=76).splitlines()
    assert [line.split() for line in lines[-5:-1]] == [list(each) for each in said]
    assert not any("response" in line for line in lines)


def test_the_time_left_follows_the_clock_between_the_last_twenty_steps(
    capsys: pytest.CaptureFixture,
) -> None:
    """Fails when evaluations and checkpoints between steps do not count, or a slow start counts."""
    clock = Clock()
    view = View(title="trial", num_steps=100, clock=clock)
    clock.now_s = 1000.0
    for step in range(1, 27):
        view.step(step, {"time/step_s": 6.0})
        clock.now_s += 1000.0 if step == 1 else 10.0
    lines = {line.split()[0]: line.split()[-1] for line in capsys.readouterr().out.splitlines()}
    assert lines["1"] == "9m54s", "99 steps of the 6 s that the first step says it took"
    assert lines["2"] == "1d03h", "98 steps of 1000 s"
    assert lines["26"] == "12m20s", "74 steps of 10 s"


@pytest.mark.parametrize(
    ("variables", "redraws"),
    [
        ({"TERM": "xterm-256color"}, True),
        ({"TERM": "dumb"}, False),
        ({"TERM": "xterm-color", "FORCE_COLOR": "1", "JPY_PARENT_PID": "7"}, False),
    ],
    ids=["terminal", "dumb", "notebook"],
)
def test_the_live_view_needs_a_terminal_that_can_move_its_cursor(monkeypatch, variables, redraws):
    """Fails when a notebook or a dumb terminal gets thousands of lines of control characters."""
    for name in ("TERM", "FORCE_COLOR", "JPY_PARENT_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    controller, terminal = os.openpty()
    with os.fdopen(controller), os.fdopen(terminal, "w") as file:
        assert can_redraw(Console(file=file, _environ=os.environ)) == redraws


def test_a_pipe_gets_plain_lines_even_where_colours_are_requested(monkeypatch):
    """CI services set FORCE_COLOR. Fails when rich's `is_terminal` decides."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not can_redraw(Console(file=io.StringIO()))
