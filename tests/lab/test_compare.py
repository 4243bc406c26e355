"""The comparison of runs: variants, equal budgets, time to an accuracy, paired intervals."""

import html
import math
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import vl_convert
import yaml
from report_page import Page
from report_runs import GROUP_SIZE, NUM_GROUPS, REST_S, make_run

from april_rl.lab.commands.compare import main
from april_rl.lab.report.compared_run import FIGURES, Figure, evaluations
from april_rl.lab.report.comparison import SYNCHRONOUS, RunComparison, compare
from april_rl.lab.report.comparison_page import comparison_page, comparison_table
from april_rl.lab.report.run_files import ReportError

STEPS, SEEDS = 12, (0, 1, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    for seed in SEEDS:
        make_run(folder / f"a{seed}", factor=1.0, seed=seed, num_steps=STEPS)
        accuracy = (0.5, 0.7 + 0.1 * (seed == 0))
        make_run(folder / f"b{seed}", factor=2.0, seed=seed, num_steps=STEPS, accuracy=accuracy)
    return folder


@pytest.fixture(scope="module")
def comparison(folder: Path) -> RunComparison:
    return compare([folder], accuracy=None, evaluation_set=None)


def figure(label: str) -> Figure:
    return next(figure for figure in FIGURES if figure.label == label)


def test_runs_are_grouped_by_the_settings_in_which_they_differ(
    comparison: RunComparison, tmp_path: Path
) -> None:
    """Seeds do not create a variant, and the synchronous loop is the baseline."""
    assert list(comparison.variants) == [SYNCHRONOUS, "α = 2"]
    assert [len(runs) for runs in comparison.variants.values()] == [3, 3]
    for name, rate in (("slow", 1e-6), ("fast", 1e-5)):
        config = make_run(tmp_path / name, num_steps=2) / "config.yaml"
        settings = yaml.safe_load(config.read_text())
        settings["optimizer"]["lr"] = rate
        config.write_text(yaml.safe_dump(settings))
    found = compare([tmp_path / "slow", tmp_path / "fast"], accuracy=None, evaluation_set=None)
    assert list(found.variants) == ["optimizer.lr=1e-05", "optimizer.lr=1e-06"]


@pytest.mark.parametrize("is_named", [True, False])
def test_runs_that_differ_in_much_get_a_short_heading(tmp_path: Path, is_named: bool) -> None:
    """The heading is their `name`, or else their folder; the settings are listed once, below."""
    for place, name in enumerate(("first", "second")):
        config = make_run(tmp_path / name / "run", num_steps=2) / "config.yaml"
        settings = yaml.safe_load(config.read_text())
        settings["model"]["path"] = f"/models/a_model_with_a_long_name_{place}"
        settings["optimizer"]["lr"] = 1e-5 * (place + 1)
        settings["name"] = f"run_{place}" if is_named else "run"
        config.write_text(yaml.safe_dump(settings))
    found = compare([tmp_path], accuracy=None, evaluation_set=None)
    heads = ["run_0", "run_1"] if is_named else ["first/run", "second/run"]
    assert list(found.variants) == heads
    text, page = comparison_table(found), comparison_page(found)
    assert all(len(line) < 100 for line in text.partition("\n\n")[0].splitlines())
    for written in (text, page):
        assert written.count("a_model_with_a_long_name_0") == 1


def test_runs_are_compared_at_an_accuracy_that_all_of_them_reach(comparison: RunComparison) -> None:
    runs = [run for runs in comparison.variants.values() for run in runs]
    budget = comparison.budget
    assert budget.samples == STEPS * NUM_GROUPS * GROUP_SIZE
    assert budget.seconds == min(run.total("time/step_s") for run in runs)
    assert budget.accuracy == 0.7, "the best accuracy of the worst run"


def test_time_to_an_accuracy_is_interpolated_between_evaluations(comparison: RunComparison) -> None:
    """Accuracy rises by equal amounts per step, so 0.6 is reached after half of the steps, and
    0.625 half a step before 0.6333.
    """
    run = comparison.variants[SYNCHRONOUS][0]
    seconds = [row["time/step_s"] for row in run.steps]
    for accuracy, steps in ((0.5, 0.0), (0.6, 6.0), (0.625, 7.5), (0.7, 12.0)):
        budget = replace(comparison.budget, accuracy=accuracy)
        whole = int(steps)
        expected = sum(seconds[:whole]) + (steps - whole) * sum(seconds[whole : whole + 1])
        assert figure("seconds to the accuracy").value(run, budget) == pytest.approx(expected)
        samples = figure("trained samples to the accuracy").value(run, budget)
        assert samples == pytest.approx(steps * NUM_GROUPS * GROUP_SIZE)
    budget = replace(comparison.budget, accuracy=0.9)
    assert figure("seconds to the accuracy").value(run, budget) is None


def test_accuracy_after_equal_time_differs_from_that_after_equal_samples(
    comparison: RunComparison,
) -> None:
    """Fails when a faster run is compared at the time of the slower one."""
    april = comparison.variants["α = 2"][1]
    budget = replace(comparison.budget, seconds=april.total("time/step_s") / 2)
    times = evaluations(april, "held_out")
    after = figure("accuracy after equal time").value(april, budget)
    assert after is not None
    assert times[0].accuracy < after < times[-1].accuracy
    assert figure("accuracy after equal samples").value(april, budget) == pytest.approx(0.7)


def test_ratios_are_paired_by_seed_and_have_students_t_interval(comparison: RunComparison) -> None:
    rate = figure("trained samples/s")
    ratios = []
    for mine, base in zip(*reversed(comparison.variants.values()), strict=True):
        assert mine.setting("seed") == base.setting("seed")
        ratios.append(math.log(base.total("time/step_s") / mine.total("time/step_s")))
    found = comparison.pair(rate, "α = 2")
    assert found is not None
    mean = fmean(ratios)
    deviation = math.sqrt(sum((ratio - mean) ** 2 for ratio in ratios) / 2)
    assert found == pytest.approx((mean, 4.303 * deviation / math.sqrt(3)))
    assert mean > 0, "over-sampling is faster"
    text = comparison.versus(rate, "α = 2")
    assert re.fullmatch(r"× \d\.\d\d \[\d\.\d\d, \d\.\d\d\]", text)
    assert comparison.versus(rate, SYNCHRONOUS) == ""


def test_seeds_without_a_partner_are_not_paired_and_one_pair_has_no_ratio(folder: Path) -> None:
    paths = [folder / name for name in ("a0", "b0", "b1")]
    found = compare(paths, accuracy=None, evaluation_set=None)
    rate = figure("trained samples/s")
    paired = found.pair(rate, "α = 2")
    assert paired is not None
    assert math.isinf(paired[1])
    assert not found.versus(rate, "α = 2")


NO_RATIO = "Ratios to {} are left out where chance alone may explain them: {}. Compare"


@pytest.mark.parametrize(
    ("seeds", "num_steps", "end", "reason", "num_ratios"),
    [
        ((0, 1), 10, 0.7, "", 9),
        ((0,), 10, 0.7, "fewer than 2 seeds in common (α = 2)", 0),
        ((0, 1), 9, 0.7, "a run of fewer than 10 steps (α = 2)", 0),
        (
            (0, 1),
            10,
            0.54,
            "an accuracy to reach that is inside the 95 % interval of a first evaluation (α = 2)",
            7,
        ),
    ],
)
def test_ratios_that_chance_explains_are_left_out_with_the_reason(
    tmp_path: Path, seeds: tuple[int, ...], num_steps: int, end: float, reason: str, num_ratios: int
) -> None:
    """In the page and in the terminal. If the accuracy never leaves the interval of the first
    evaluation (0.5 ± 0.05), the time to reach it is left to chance.
    """
    for seed in seeds:
        for factor in (1.0, 2.0):
            make_run(
                tmp_path / f"{factor}_{seed}",
                factor=factor,
                seed=seed,
                num_steps=num_steps,
                accuracy=(0.5, end),
            )
    found = compare([tmp_path], accuracy=None, evaluation_set=None)
    sentence = NO_RATIO.format(SYNCHRONOUS, reason)
    for text in (comparison_table(found), html.unescape(comparison_page(found))):
        assert text.count("× ") == num_ratios, text
        assert (sentence in text) == bool(reason)


def test_only_a_factor_of_one_without_refill_is_called_synchronous(tmp_path: Path) -> None:
    """Fails when α = 1 with refill is called so, or when refill alone does not make another
    variant.
    """
    for name, refill in (("with", True), ("without", False)):
        config = make_run(tmp_path / name, factor=1.0, num_steps=2) / "config.yaml"
        settings = yaml.safe_load(config.read_text())
        settings["rollout"]["refill"] = refill
        config.write_text(yaml.safe_dump(settings))
    make_run(tmp_path / "two", factor=2.0, num_steps=2)
    names = [*compare([tmp_path], accuracy=None, evaluation_set=None).variants]
    assert names == [SYNCHRONOUS, "α = 1 with refill", "α = 2"]
    paths = [tmp_path / "with", tmp_path / "two"]
    page = comparison_page(compare(paths, accuracy=None, evaluation_set=None))
    assert "<h1>α = 1 with refill against α = 2</h1>" in page
    assert SYNCHRONOUS not in page


def test_runs_of_one_seed_are_averaged(comparison: RunComparison) -> None:
    """Fails when the last run of a seed represents all of them, or the others count as missing."""
    runs = comparison.variants[SYNCHRONOUS][:1]
    slow = replace(
        runs[0], rows=[{**row, "time/step_s": 3 * row["time/step_s"]} for row in runs[0].steps]
    )
    twice = replace(comparison, variants={**comparison.variants, SYNCHRONOUS: [*runs, slow]})
    median = figure("step, seconds, p50")
    alone = median.value(runs[0], comparison.budget)
    assert twice.mean(median, SYNCHRONOUS) == pytest.approx(2 * alone)
    assert twice.missing(median, SYNCHRONOUS) == 0
    [april, _, _] = comparison.variants["α = 2"]
    ratio = math.log(median.value(april, comparison.budget) / (2 * alone))
    assert twice.pair(median, "α = 2") == (pytest.approx(ratio), math.inf)


def test_memory_is_the_largest_of_a_run(comparison: RunComparison) -> None:
    run = comparison.variants["α = 2"][0]
    rows = [
        {**row, "memory/worker_rss_bytes": (3 - n % 2) * 2**30, "memory/gpu_used_frac": 0.1 * n}
        for n, row in enumerate(run.rows[:4])
    ]
    measured = replace(run, rows=rows)
    assert figure("largest worker, GiB").value(measured, comparison.budget) == 3.0
    assert figure("fullest GPU").value(measured, comparison.budget) == pytest.approx(0.3)
    assert figure("fullest GPU").value(run, comparison.budget) is None


def test_shares_are_compared_by_difference(comparison: RunComparison) -> None:
    off_policy = figure("off-policy tokens")
    assert comparison.mean(off_policy, SYNCHRONOUS) == 0.0
    share = comparison.mean(off_policy, "α = 2")
    assert share is not None
    assert comparison.pair(off_policy, "α = 2")[0] == pytest.approx(share)
    points = comparison.versus(off_policy, "α = 2")
    assert re.fullmatch(r"\+\d\d\.\d ± \d+\.\d points", points)
    waiting = figure("slots that wait during a rollout")
    assert comparison.mean(waiting, SYNCHRONOUS) > 2 * comparison.mean(waiting, "α = 2") > 0


def test_a_slow_reward_shows_as_idle_slots(comparison: RunComparison) -> None:
    """The engines of a run compute for half of each rollout, which then waits for rewards. Fails
    when only the time in which engines compute is compared.
    """
    run = comparison.variants["α = 2"][0]
    rows = [
        {
            **row,
            "rollout/time_s": 2 * row["rollout/time_s"],
            "rollout/occupancy": row["rollout/occupancy"] / 2,
            "time/score_s": row["rollout/time_s"],
        }
        for row in run.steps
    ]
    slow = replace(run, rows=rows)
    awaiting, waiting = (
        figure(label)
        for label in ("rollout that waits for rewards alone", "slots that wait during a rollout")
    )
    assert awaiting.value(run, comparison.budget) == 0.0
    assert awaiting.value(slow, comparison.budget) == pytest.approx(0.5)
    idle, slow_idle = (waiting.value(each, comparison.budget) for each in (run, slow))
    assert slow_idle == pytest.approx(0.5 + idle / 2)


def test_runs_that_never_reach_the_accuracy_are_counted(folder: Path) -> None:
    found = compare([folder], accuracy=0.75, evaluation_set="held_out")
    seconds = figure("seconds to the accuracy")
    assert (found.missing(seconds, SYNCHRONOUS), found.missing(seconds, "α = 2")) == (3, 2)
    table = comparison_table(found)
    assert "not reached" in table
    assert "(2 without)" in table


def test_the_page_has_the_table_and_its_charts_are_valid(comparison: RunComparison) -> None:
    page = Page(comparison_page(comparison))
    assert "<h1>synchronous against α = 2</h1>" in comparison_page(comparison)
    assert page.specs.keys() == {"accuracy-seconds", "accuracy-samples", "step-seconds"}
    for spec in page.specs.values():
        assert vl_convert.vegalite_to_vega(spec)["marks"]
    assert page.tags.count("tr") == 2 + len(FIGURES) - 3, (
        "these runs report neither untrained samples nor memory"
    )
    lines = {point["run"] for point in page.specs["accuracy-seconds"]["data"]["values"]}
    assert len(lines) == 6
    seconds = [p["seconds"] for p in page.specs["step-seconds"]["data"]["values"]]
    assert len(seconds) == 6 * STEPS
    assert min(seconds) > REST_S


def test_the_command_prints_the_table_and_writes_the_page(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "page.html"
    assert main([str(folder), "--html", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split() == [SYNCHRONOUS, "α", "=", "2"]
    assert str(path) in printed
    page = path.read_text()
    assert "<title>Comparison of runs</title>" in page
    assert "<table>" in page


@pytest.mark.parametrize(
    ("key", "value", "is_warned"),
    [
        ("reward.function", "letters:partial", True),
        ("reward.args", {"strict": True}, True),
        ("data.path", "other.jsonl", True),
        ("evaluation.sets", {"held_out": {"path": "other.jsonl"}}, True),
        ("evaluation.sets", {"another": {"path": "other.jsonl"}}, False),
        ("reward.num_processes", 7, False),
        ("optimizer.lr", 3e-6, False),
    ],
)
def test_accuracies_of_other_rewards_or_data_come_with_a_warning(
    tmp_path: Path, key: str, value: object, is_warned: bool
) -> None:
    section, _, name = key.partition(".")
    config = make_run(tmp_path / "a", num_steps=2) / "config.yaml"
    make_run(tmp_path / "b", num_steps=2)
    settings = yaml.safe_load(config.read_text())
    settings[section][name] = value
    config.write_text(yaml.safe_dump(settings))
    found = compare([tmp_path], accuracy=None, evaluation_set=None)
    for text in (comparison_table(found), comparison_page(found)):
        assert ("scored by other rewards or on other data" in text) == is_warned
        assert not is_warned or f"{key}" in text.partition("may not mean the same: ")[2]


def test_a_table_that_is_wider_than_the_terminal_is_divided(comparison: RunComparison) -> None:
    whole, narrow = (comparison_table(comparison, width=width) for width in (None, 80))
    assert max(map(len, whole.splitlines())) > 80 >= max(map(len, narrow.splitlines()))
    assert sorted(narrow.split()) == sorted([*whole.split(), *_labels(comparison)])


def _labels(comparison: RunComparison) -> list[str]:
    """Return the words of the first column, which the second part of the table repeats."""
    return " ".join(label for label, _ in comparison.rows()).split()


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["a0"], {}, "at least two runs"),
        (["a0", "nothing"], {}, "is not a run directory and contains none"),
        (["a0", "b0"], {"evaluation_set": "other"}, "--set other: the runs have held_out"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(
    folder: Path, names: list[str], options: dict, message: str
) -> None:
    (folder / "nothing").mkdir(exist_ok=True)
    asked = {"accuracy": None, "evaluation_set": None} | options
    with pytest.raises(ReportError, match=message):
        compare([folder / name for name in names], **asked)
