"""report.html: its content, that it is safe and small, and that a browser draws it."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import vl_convert
from report_page import Page
from report_runs import HOSTILE, make_run

from april_rl.__main__ import main
from april_rl.lab.report import html
from april_rl.lab.report.advisories import advisories
from april_rl.lab.report.charts import PHASES, REST, phase_seconds
from april_rl.lab.report.gains import Gains, simulated_gains
from april_rl.lab.report.report import head_figures, write_report
from april_rl.lab.report.run_files import RunFiles, read_run
from april_rl.start.commands.at_end import report_line

CHARTS = {
    *("reward", "evaluation", "time", "lengths", "length-histogram", "ages", "ledger"),
    *("occupancy", "rework", "teacher", "critic", "mismatch", "timeline", "synchronous"),
    # The small charts of the learner's update; this run has no reference.
    *("loss-total", "loss-entropy", "loss-grad_norm", "loss-clip_frac", "loss-behaviour_kl"),
}
MAX_BYTES = 3_000_000
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run", response=HOSTILE)


@pytest.fixture(scope="module")
def page(run_dir: Path) -> Page:
    return Page(write_report(run_dir).path.read_text())


@pytest.fixture(scope="module")
def run(run_dir: Path) -> RunFiles:
    return read_run(run_dir)


def test_the_page_has_every_chart_the_figures_and_the_samples(page: Page, run: RunFiles) -> None:
    assert page.specs.keys() == CHARTS
    assert page.tags.count("dd") > 5
    for text in ("avg@k, held_out", "0.700", "off-policy tokens", "all 6 steps", "parked, then"):
        assert text in page.text
    rate = 16 * 6 / run.total("time/step_s")
    assert f"{rate:.1f}" in page.text
    figures = {label: (value, note) for label, value, note in head_figures(run)}
    assert figures["KL from the teacher, nats"] == ("0.08", "0.50 at step 1")
    assert figures["variance of returns that the critic explains"] == ("0.50", "0.00 at step 1")


def test_every_chart_is_valid_vega_lite_with_data_for_its_fields(page: Page) -> None:
    """vl_convert compiles a chart like the browser; a misspelt field would draw nothing."""
    for name, spec in page.specs.items():
        compiled = vl_convert.vegalite_to_vega(spec, show_warnings=False)
        assert compiled["marks"], name
        for layer, data in layers_of(spec):
            for channel in layer.get("encoding", {}).values():
                field = channel.get("field")
                assert field is None or all(field in row for row in data), (name, field)
            assert data, name


def layers_of(spec: dict) -> Iterator[tuple[dict, list[dict]]]:
    for layer in spec.get("layer", [spec]):
        yield layer, layer.get("data", spec["data"])["values"]


def test_the_page_never_executes_or_fetches_what_a_run_wrote(page: Page, run_dir: Path) -> None:
    """Fails when a response, a prompt, a name or a reward part reaches the page unescaped."""
    text = (run_dir / "report.html").read_text()
    assert "<script>window.pwned" not in text
    assert "<img" not in text.replace(html.vega_bundle() or "", "")
    assert page.tags.count("script") == len(CHARTS) + 2
    assert "img" not in page.tags
    assert not any(name in ("src", "href") or name.startswith("on") for name, _ in page.attributes)
    assert "window.pwned=1" in page.text, "the response is shown as text"
    assert "default-src 'none'" in text


def test_the_phases_of_a_step_add_up_to_its_time(run: RunFiles, page: Page) -> None:
    for row in run.steps:
        seconds = phase_seconds(row)
        assert seconds.keys() == {*(name for name, _ in PHASES), REST}
        assert sum(seconds.values()) == pytest.approx(row["time/step_s"])
        assert all(value >= -1e-9 for value in seconds.values())
        assert seconds[REST] == pytest.approx(0.1 * 0.25), "update and sync are nine tenths"
    drawn = page.specs["time"]["data"]["values"]
    assert sum(value["seconds"] for value in drawn) == pytest.approx(run.total("time/step_s"))


def test_a_long_run_is_drawn_as_means_over_several_steps(long_run: Path) -> None:
    """Fails when steps are left out, or the phases of a mean do not add up to its time."""
    run = read_run(long_run)
    page = Page(write_report(long_run).path.read_text())
    bars = page.specs["time"]["data"]["values"]
    assert len({bar["step"] for bar in bars}) == 60
    mean_s = run.total("time/step_s") / len(run.steps)
    assert sum(bar["seconds"] for bar in bars) / 60 == pytest.approx(mean_s)
    flows = page.specs["ledger"]["data"]["values"]
    opened = [flow["value"] for flow in flows if flow["name"] == "opened in the step"]
    assert len(opened) == 150
    assert 2 * sum(opened) == run.steps[-1]["ledger/opened"]


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return 300 rows, which repeat the rows of a short run."""
    run_dir = make_run(tmp_path_factory.mktemp("runs") / "long")
    path = run_dir / "metrics.jsonl"
    _, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    last = rows[-1]
    with path.open("w") as file:
        for number in range(300):
            row = dict(rows[number % len(rows)])
            for name in ("opened", "trained"):
                row[f"ledger/{name}"] += number // len(rows) * last[f"ledger/{name}"]
            file.write(json.dumps(row | {"step": number + 1}) + "\n")
    return run_dir


def test_a_run_of_very_long_responses_has_a_page_of_three_megabytes_at_most(tmp_path: Path) -> None:
    path = write_report(make_run(tmp_path / "run", response="x < y " * 30_000)).path
    assert 900_000 < path.stat().st_size < MAX_BYTES
    assert "characters …]" in path.read_text()


@pytest.mark.usefixtures("page")  # which writes the report
def test_a_chrome_trace_of_the_timeline_is_written_next_to_it(run_dir: Path, run: RunFiles) -> None:
    trace = json.loads((run_dir / "timeline" / "step_00006.trace.json").read_text())
    step, timeline = run.timeline
    assert (step, timeline is not None) == (6, True)
    stays = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(stays) == len(timeline.stays)
    assert all(event["ts"] >= 0 and event["dur"] > 0 for event in stays)
    assert max(e["ts"] + e["dur"] for e in stays) == pytest.approx(1e6 * timeline.time_s, rel=0.01)
    assert {event["cat"] for event in stays} == {"finished", "parked"}


def test_the_synchronous_step_for_comparison_is_longer_and_starts_all_samples_at_once(
    run: RunFiles,
) -> None:
    found = simulated_gains(run)
    assert found is not None
    assert {stay.sent_s for stay in found.synchronous.stays} == {0.0}
    waiting, samples = found.tail
    assert 0 < samples < waiting < 1
    assert found.by_factor[2.0] > 1, "over-sampling gains with lognormal lengths"


# The advice that a run gets in words.


def advice_for(run: RunFiles, gains: Gains | None = None, **changes: object) -> str:
    return "\n".join(advisories(replace(run, rows=[{**r, **changes} for r in run.rows]), gains))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"reward/errors": 4.0, "ledger/ready": 1}, r"The reward failed on 28 % of the samples"),
        ({"time/score_s": 9.0}, r"Rollouts wait for rewards for \d+ % .*\(10\.5 s a step\)"),
        ({"time/score_s": 9.0, "environment/step_s": 5.3}, r"and environments .* takes 5\.3 s to"),
        ({"environment/contexts_mean": 2.7, "environment/turns_mean": 3}, r"2\.7 contexts in 3\.0"),
        ({"reward/no_signal_frac": 1.0}, r"No group has a signal since step 0"),
        ({"reward/no_signal_frac": 0.6}, r"60 % of the groups have no signal.*dynamic_sampling"),
        ({"staleness/age_max": 8}, r"The staleness cap binds: in 100 % .* age 8 was trained"),
        (
            {
                "staleness/age_max": 8,
                "rollout/over_sampling_factor": 2,
                "rollout/response_tokens_max": 9000,
                "rollout/response_tokens_mean": 300,
            },
            r"no step waits at rollout.max_staleness=60 .* --alpha 2 --max-staleness 60",
        ),
        ({"staleness/masked_tokens": 10}, r"70 tokens were older than the cap"),
        (
            {"rollout/reprefill_tokens": 30_000, "rollout/time_s": 2},
            r"15 % of the rollouts went into prefilling parked samples again.*resume=keep",
        ),
        (
            {
                "rollout/reprefill_tokens": 30_000,
                "rollout/time_s": 2,
                "rollout/kept_samples": 1,
                "rollout/kv_cache_frac": 0.93,
            },
            r"parked samples again.*; their KV cache made room for running ones: give it more",
        ),
        ({"rollout/preempted_samples": 3}, r"lost their KV cache 21 times"),
        ({"rollout/failed_attempts": 2}, r"Engines failed 14 attempts at a response"),
        ({"rollout/truncated_frac": 0.3}, r"30 % .* cut off by rollout.max_response_tokens=400"),
        ({"mismatch/logprob_abs_mean": 0.3}, r"disagree by 0.300 nats"),
    ],
)
def test_the_report_advises_what_to_change(run: RunFiles, changes: dict, sentence: str) -> None:
    healthy = {"staleness/age_max": 1, "rollout/truncated_frac": 0.0}
    assert advice_for(run, None, **healthy) == ""
    assert re.search(sentence, advice_for(run, None, **(healthy | changes)))


@pytest.mark.parametrize(
    ("entropies", "is_collapsed"),
    [
        ([0.043] * 2, True),  # hardly a choice, from the beginning
        ([0.9] * 10 + [0.5] * 20 + [0.15] * 10, True),
        ([0.08] * 30 + [0.045] * 5, False),  # a few batches of short answers
        ([2.25] * 10 + [0.3] * 10, False),  # a steep fall, to an entropy that others begin with
        ([0.19] * 10 + [0.1] * 10, False),  # low from the beginning
        ([0.06] * 5, False),
        ([], False),
    ],
)
def test_the_report_says_when_entropy_has_collapsed(
    run: RunFiles, entropies: list[float], is_collapsed: bool
) -> None:
    rows = [{"step": step, "loss/entropy": value} for step, value in enumerate(entropies)]
    advice = "\n".join(advisories(replace(run, rows=rows), None))
    assert ("Entropy has collapsed" in advice) == is_collapsed


# Steps of runs that keep KV caches; the first step after a resume has none to keep.
ROOM = {"rollout/kept_samples": 9, "rollout/kv_cache_frac": 0.006}
FULL = {"rollout/kept_samples": 3, "rollout/kv_cache_frac": 0.93}
AGAIN = {"rollout/reprefill_tokens": 60_000}
RESUMED = {"rollout/kept_samples": 0} | AGAIN


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([ROOM, RESUMED, ROOM, RESUMED], None),
        ([FULL, FULL | RESUMED, FULL], None),
        ([ROOM, RESUMED, FULL | AGAIN, FULL | AGAIN], "made room for running ones"),
        ([ROOM | AGAIN | {"rollout/preempted_samples": 2}], "made room for running ones"),
        ([ROOM | AGAIN], "was not kept, although it had room"),
        ([RESUMED, RESUMED], "rollout.resume=keep, with engines that stay awake, saves that"),
    ],
)
def test_a_cache_that_ended_with_its_process_is_not_called_too_small(
    run: RunFiles, rows: list[dict], reason: str | None
) -> None:
    rows = [
        {"step": 20 + n, "time/step_s": 1, "rollout/time_s": 2, **r} for n, r in enumerate(rows)
    ]
    text = "\n".join(advisories(replace(run, rows=rows), None))
    assert ("prefilling parked samples again" in text) == (reason is not None)
    assert reason is None or reason in text


@pytest.mark.parametrize(
    ("cap", "parked", "is_told"), [(6, 6460, False), (5, 6460, True), (6, 0, True)]
)
def test_short_runs_get_no_advice_about_lengths_that_are_parked_still(
    run: RunFiles, cap: int, parked: int, is_told: bool
) -> None:
    """The run has six steps; the longest responses are trained at most `cap` steps later."""
    found = with_cap(run, cap)
    found = replace(found, rows=[{**row, "rollout/parked_tokens": parked} for row in run.rows])
    vars(found)["length_bias"] = replace(run.length_bias, dispersion=1.4)
    advice = "\n".join(advisories(found, simulated_gains(run)))
    assert ("samples/s" in advice) == is_told
    assert advice.count("deviates 1.4 times as far") == is_told


def with_cap(run: RunFiles, cap: int) -> RunFiles:
    return replace(run, config={**run.config, "rollout": {"refill": True, "max_staleness": cap}})


def test_the_report_states_the_long_tail_and_the_gain_of_another_alpha(run: RunFiles) -> None:
    found = simulated_gains(run)
    assert found is not None
    run = with_cap(run, 5)
    text = advice_for(run, replace(found, by_factor={2.0: 1.2, 3.0: 1.8}))
    assert re.search(r"\d+ % of a synchronous rollout would wait for the last \d+ % of its", text)
    assert "α = 2, as run, gives +20%" in text
    assert "α = 3 would give +50% over this run" in text
    assert "What small batches cost is a guess there" in text
    short = advice_for(
        run, replace(found, synchronous=replace(found.synchronous, stays=_equal(found)))
    )
    assert "hardly any tail" in short


def _equal(found: Gains) -> tuple:
    ended_s = found.synchronous.time_s
    return tuple(stay._replace(ended_s=ended_s) for stay in found.synchronous.stays)


# The command, and the report at the end of a run.


def test_a_run_without_samples_or_engine_cost_keeps_its_other_charts(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", num_steps=2)
    shutil.rmtree(run_dir / "samples")
    shutil.rmtree(run_dir / "timeline")
    page = Page(write_report(run_dir).path.read_text())
    assert page.specs.keys() == CHARTS - {"length-histogram", "timeline", "synchronous"}


def test_without_vl_convert_the_page_says_how_to_get_charts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(html, "find_spec", lambda _: None)
    text = html.page("title", [])
    assert "pip install vl-convert-python" in text
    assert len(text) < 20_000


def test_the_command_refuses_a_folder_that_is_not_a_run_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 1
    assert "is not the directory of a run: it has no metrics.jsonl" in capsys.readouterr().err


def test_a_run_ends_with_the_path_of_its_report_or_why_there_is_none(
    tmp_path: Path, long_run: Path
) -> None:
    """A failure to write it is one line; a run that logged nothing gets no report."""
    line, *advice = report_line(long_run, since_s=0.0).splitlines()
    assert line == f"report: {long_run / 'report.html'}"
    assert advice == [f"  - {text}" for text in write_report(long_run).advice] != []
    assert report_line(tmp_path, since_s=0.0) is None
    assert report_line(long_run, since_s=4e9) is None
    (tmp_path / "metrics.jsonl").write_text("not json\n")
    (tmp_path / "config.yaml").write_text("name: x\n")
    line = report_line(tmp_path, since_s=0.0)
    assert line is not None
    assert line.startswith("report: not written (error: ")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, which is not installed here")
@pytest.mark.parametrize(
    ("which", "width", "dark"),
    [
        *(("run_dir", width, dark) for width in (390, 1400) for dark in (False, True)),
        ("long_run", 1400, False),
    ],
)
def test_a_browser_draws_every_chart_without_errors(
    request: pytest.FixtureRequest, tmp_path: Path, which: str, width: int, dark: bool
) -> None:
    """In real Chromium, from file://, light and dark, on a phone and on a desktop."""
    report = write_report(request.getfixturevalue(which)).path
    done = subprocess.run(
        [
            *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-background-networking", f"--user-data-dir={tmp_path}"),
            *(f"--window-size={width},1400", "--enable-logging=stderr", "--dump-dom"),
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            *("--virtual-time-budget=8000", report.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    drawn = re.findall(
        r'<div class="chart[^"]*" id="([\w-]+)"[^>]*>(?:<div[^>]*>)?<(svg|canvas)', done.stdout
    )
    assert {name for name, _ in drawn} == CHARTS
    assert "&lt;script&gt;window.pwned=1" in done.stdout, "the name of the run is text"
