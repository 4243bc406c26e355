"""A run's name, group and tags in a tracker, and the axes on which runs are compared."""

import subprocess

import pytest
from source_tree import ROOT

from april_rl.run.tracking import keys
from april_rl.run.tracking.labels import RunLabels, run_labels, versions
from april_rl.run.tracking.metrics_file import Axes


@pytest.mark.parametrize(
    ("overrides", "name", "group"),
    [
        (["+recipe=tiny_cpu"], "", ""),
        (
            ["seed=3", "rollout.over_sampling_factor=2", "tracking.backends=[]"],
            " seed=3 over_sampling_factor=2",
            " over_sampling_factor=2",
        ),
        (
            ["rollout={over_sampling_factor:1,refill:false}", "seed=3"],
            " over_sampling_factor=1 refill=false seed=3",
            " over_sampling_factor=1 refill=false",
        ),
        (
            ["model.path=tiny_chat", "data.path=letters.jsonl", "~evaluation.sets.held_out"],
            *[" model.path=tiny_chat data.path=letters.jsonl ~held_out"] * 2,
        ),
        (
            ["seed=3", "data.seed=4", "+evaluation.sets.test={path: a.jsonl, samples: 2}"],
            " seed=3 data.seed=4 path=a.jsonl samples=2",
            " data.seed=4 path=a.jsonl samples=2",
        ),
        (["algorithm=gspo", "++engine.x=" + "9" * 200], *[f" algorithm=gspo x={'9' * 106}"] * 2),
    ],
)
@pytest.mark.parametrize(("sweep", "tags"), [("", ()), ("12-00-00", ("sweep=12-00-00",))])
def test_runs_are_named_by_their_overrides_and_grouped_without_the_seed(
    overrides, name, group, sweep, tags
):
    assert run_labels("tiny", overrides=overrides, seed=3, sweep=sweep) == RunLabels(
        name=f"tiny{name}",
        group=f"tiny{group}",
        tags=("tiny", "seed=3", *tags),
        overrides=tuple(overrides),
    )


def test_the_commit_of_a_checkout_is_among_the_versions():
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert versions()["commit"].removesuffix("-dirty") == commit


def test_a_resumed_run_continues_its_counts_of_tokens_and_time():
    times = iter([100.0, 105.0])
    axes = Axes({keys.TRAINED_TOKENS: 80.0, keys.RUN_TIME: 30.0}, clock=lambda: next(times))
    values = axes.advance({"throughput/trained_tokens": 40.0})
    assert values == {keys.TRAINED_TOKENS: 120.0, keys.RUN_TIME: 35.0}
