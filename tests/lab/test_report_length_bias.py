"""The report's length bias, computed from the timelines of recorded steps, and its statistics."""

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_runs import Run, Setup, lognormal

from april_rl.lab.report.length_bias import LengthBias
from april_rl.lab.simulator.length_statistics import dispersion, restricted_mean
from april_rl.training.rollout.measures.timeline import Timeline, timeline_of
from april_rl.types import SampleId


def record(run: Run, num_steps: int) -> list[Timeline]:
    return [timeline_of(run.step().record) for _ in range(num_steps)]


def lengths_of(seed: int) -> Callable[[SampleId], int]:
    return lambda each: lognormal(6, 0.8)(SampleId(each.prompt_id + 977 * seed, each.index))


def test_the_means_are_right_although_many_opened_samples_are_unfinished() -> None:
    """After three steps, the trained samples are shorter than the opened ones. The mean of the
    opened ones is within 3 % over twelve runs, up to the longest length seen; the mean of the
    trained ones is exact. Fails when unfinished samples are left out, or count as finished.
    """
    read, true, trained = [], [], []
    for seed in range(12):
        setup = Setup(num_groups=16, group_size=4, alpha=3.0, length_of=lengths_of(seed))
        run = Run(replace(setup, budget=60, tick_steps=2))
        timelines = record(run, 3)
        lengths = [s.num_tokens for scored in run.trained for s in scored.group.samples]
        longest = max(lengths + [sample.num_tokens for sample in run.alive])
        ids = [SampleId(prompt_id, i) for prompt_id in run.prompts.taken for i in range(4)]
        found = LengthBias.of(timelines)
        assert found is not None
        assert found.trained_tokens_mean == fmean(lengths)
        read.append(found.opened_tokens_mean)
        true.append(fmean(min(run.setup.length_of(each), longest) for each in ids))
        trained.append(fmean(lengths))
    assert fmean(read) == pytest.approx(fmean(true), rel=0.03)
    assert fmean(trained) < 0.9 * fmean(true)


@pytest.mark.parametrize("turns", [0, 3])
def test_a_run_that_ends_has_trained_all_lengths_that_it_opened(turns: int) -> None:
    """This holds for every group, and for samples whose environment ends them. Fails when a sample
    counts twice or never.
    """
    run = Run(Setup(num_groups=4, group_size=2, alpha=3.0, turns=turns, length_of=lengths_of(0)))
    timelines = record(run, 4)
    while run.alive:
        timelines.append(timeline_of(run.step(may_open=False).record))
    found = LengthBias.of(timelines)
    assert found is not None
    assert found.opened_tokens_mean == pytest.approx(found.trained_tokens_mean)


def test_groups_opened_before_the_recorded_steps_do_not_count_as_opened() -> None:
    """Fails when a long response that these steps only finish, or still wait for, counts as one
    that they opened.
    """
    run = Run(Setup(num_groups=8, group_size=4, alpha=3.0, length_of=lognormal(6, 0.8), budget=60))
    record(run, 12)
    timelines = record(run, 2)
    found = LengthBias.of(timelines)
    without = [
        replace(
            each,
            stays=tuple(s for s in each.stays if s.prompt_id >= timelines[0].opened[0]),
            settled=tuple(s for s in each.settled if s.prompt_id >= timelines[0].opened[0]),
        )
        for each in timelines
    ]
    assert found is not None
    assert without != timelines
    assert LengthBias.of(without) == found


LENGTHS = st.lists(st.integers(0, 12), max_size=12)


@given(LENGTHS, LENGTHS)
def test_the_restricted_mean_is_the_area_under_the_product_limit_curve(finished, unfinished):
    """Compared with the textbook's product over distinct lengths, summed token by token. Fails when
    an unfinished sample of the same length leaves before a finished one, or the risk set is off by
    one.
    """
    survival, area = 1.0, 0.0
    for position in range(max(finished + unfinished, default=0)):
        at_risk = sum(length >= position for length in finished + unfinished)
        survival *= 1 - finished.count(position) / at_risk
        area += survival
    assert restricted_mean(finished, unfinished) == pytest.approx(area)


def test_dispersion_is_one_for_random_batches_and_otherwise_a_ratio_of_deviations():
    """Offsets with a standard deviation of 0.5 double the deviation of means of 16 values compared
    with random draws of the same values: (1/16 + 1/4) is 4 times (1 + 1/4) / 16. Fails when the
    variance of the values is not divided by the size of a batch, or the root is forgotten.
    """
    rng = np.random.default_rng(0)
    values = rng.normal(size=(4000, 16))
    assert dispersion(values.tolist()) == pytest.approx(1, abs=0.05)
    offsets = rng.normal(scale=0.5, size=(4000, 1))
    assert dispersion((values + offsets).tolist()) == pytest.approx(2, rel=0.05)
    assert dispersion(values[:9].tolist()) is None
    assert dispersion([[3.3, 3.3]] * 20) is None


@pytest.mark.parametrize("size", [32, 128, 512])
def test_responses_that_grow_longer_do_not_count_as_dispersion(size):
    """Random batches whose mean grows by a fifth within a window. Fails when a trend that the
    policy learns looks like a schedule that sorts responses (2.5 for the largest batches).
    """
    rng = np.random.default_rng(size)
    growth = np.linspace(1.0, 1.2, 20)[:, None]
    found = [dispersion((growth * rng.lognormal(7, 0.4, (20, size))).tolist()) for _ in range(50)]
    assert np.mean(found) == pytest.approx(1, abs=0.1)
