"""Lengths and rewards of trained responses against those of all opened ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from statistics import NormalDist, fmean

import numpy as np
import pytest
from fake_engine import LengthDistribution
from fake_outside import reward
from hypothesis import given
from hypothesis import strategies as st
from light_samples import PROMPT
from rollout_runs import Run, Setup

from april_rl.rollout.buffer import Buffer
from april_rl.rollout.collector import Collection
from april_rl.rollout.measures.length_bias import LengthBias, restricted_mean
from april_rl.rollout.record import GroupEvents, GroupState, Settled
from april_rl.rollout.requests import request_seed
from april_rl.types import SampleId

BUDGET = 60
SEEDS, STEPS = range(12), 36
STEADY_FROM = 12  # two full cycles of the cap of five versions
ALPHAS = [1.0, 1.5, 3.0]


def lognormal_of(seed: int) -> LengthDistribution:
    """Lengths drawn for each sample by itself: median 6, long tail, at most the budget."""

    @cache
    def length_of(sample_id: SampleId) -> int:
        u = (request_seed(seed, sample_id, 0) + 0.5) / 2**63
        return min(max(1, round(6 * math.exp(0.8 * NormalDist().inv_cdf(u)))), BUDGET)

    return length_of


@dataclass
class Trial:
    """Lengths of the responses that a run opened and trained, by step."""

    run: Run
    opened: list[list[int]] = field(default_factory=list)
    trained: list[list[int]] = field(default_factory=list)

    def step(self, *, may_open: bool = True) -> Collection:
        taken = len(self.run.prompts.taken)
        collection = self.run.step(may_open=may_open)
        groups = collection.groups
        self.trained.append([s.num_tokens for scored in groups for s in scored.group.samples])
        ids = (SampleId(p, i) for p in self.run.prompts.taken[taken:] for i in range(4))
        self.opened.append([self.run.setup.length_of(sample_id) for sample_id in ids])
        return collection


def trial(seed: int, alpha: float, **changes: object) -> Trial:
    setup = {"num_groups": 8, "group_size": 4, "alpha": alpha, "budget": BUDGET, "tick_steps": 2}
    return Trial(Run(Setup(length_of=lognormal_of(seed), **{**setup, **changes})))  # type: ignore[arg-type]


@lru_cache
def trials(alpha: float) -> list[Trial]:
    """Twelve seeds, 36 steps each."""
    found = [trial(seed, alpha) for seed in SEEDS]
    for each in found:
        for _ in range(STEPS):
            each.step()
    return found


def flat(rows: Sequence[Sequence[int]]) -> list[int]:
    return [length for row in rows for length in row]


def largest_difference(some: Sequence[int], others: Sequence[int]) -> float:
    """Between the two cumulative distributions: the statistic of Kolmogorov and Smirnov."""
    grid = np.arange(BUDGET + 1)
    shares = [np.searchsorted(np.sort(x), grid, side="right") / len(x) for x in (some, others)]
    return float(np.abs(shares[0] - shares[1]).max())


@pytest.mark.parametrize("alpha", ALPHAS)
def test_in_steady_state_the_trained_lengths_are_distributed_as_the_opened_ones(alpha):
    """Steps 13 to 36 of twelve seeds: 9,216 trained samples against all that these steps opened.

    Largest difference of the two distributions (tolerated: 0.02) and ratio of their means (3 %):
    alpha 1: 0.002, 0.995. alpha 1.5: 0.002, 0.997. alpha 2: 0.003, 0.997. alpha 3: 0.006, 1.004.
    Fails when samples that were long at the abort are dropped. An order that favours short ones
    cannot show here while every group is trained within the cap, which the next test sees to.
    """
    found = trials(alpha)
    trained = flat([row for each in found for row in each.trained[STEADY_FROM:]])
    opened = flat([row for each in found for row in each.opened[STEADY_FROM:]])
    assert largest_difference(trained, opened) < 0.02
    assert fmean(trained) == pytest.approx(fmean(opened), rel=0.03)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_no_group_is_passed_over_for_ever(alpha):
    """After 36 steps, none that is alive is older than the cap allows in the next one. Fails when
    the newest ready groups are trained first: the others stay for ever.
    """
    for each in trials(alpha):
        oldest = [sample.oldest_version for sample in each.run.alive]
        versions = [version for version in oldest if version is not None]
        assert each.run.version - min(versions, default=each.run.version) <= 5


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_first_steps_train_short_responses_and_the_bias_fades(alpha):
    """How long the transient lasts, with a cap of five versions: mean trained length ÷ mean opened
    length of steps 1 to 6, and the root mean square of its distance from 1 over steps 1-6, 7-12,
    19-24 and 43-48 (24 seeds, of which 0.04 is noise):

    alpha 1.0: 0.73 0.92 0.99 1.00 0.96 1.04   0.12 0.04 0.05 0.04
    alpha 1.5: 0.69 0.85 0.93 0.94 0.98 1.37   0.21 0.07 0.03 0.05
    alpha 2.0: 0.66 0.82 0.91 0.94 0.98 1.58   0.29 0.11 0.11 0.05
    alpha 3.0: 0.62 0.78 0.89 1.00 1.09 1.66   0.33 0.14 0.13 0.12

    So the first two steps are short at alpha = 1; else the first five, and the sixth, in which the
    long samples of the first reach the cap, makes up for them: the mean over steps 1 to 6 is 0.94,
    0.96, 0.98 and 1.01. From there on the mean is right, and an echo about every ten steps falls
    below the noise after 12 steps at alpha = 1.5 and 40 at 2, and lasts for more than 60 at 3.
    Fails when steady state is not reached, or samples that are long at an abort are dropped.
    """
    found = trials(alpha)
    mean = fmean(flat([row for each in found for row in each.opened]))
    by_step = [fmean(flat([each.trained[k] for each in found])) / mean for k in range(STEPS)]
    cycles = [fmean([(x - 1) ** 2 for x in by_step[k : k + 6]]) ** 0.5 for k in (0, 30)]
    assert by_step[0] < 0.8
    assert max(by_step[1:8]) > 1
    assert cycles[1] < 0.6 * cycles[0]
    assert fmean(by_step) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_run_that_drains_trains_every_length_it_opened_and_what_is_left_otherwise_is_long(alpha):
    """Exactly the opened lengths, in number and value. Fails when a drain still opens prompts."""
    each = trial(99, alpha)
    for _ in range(8):
        each.step()
    left = [sample for sample in each.run.alive if not sample.is_finished]
    mean = fmean(flat(each.opened))
    if left:
        assert fmean(each.run.setup.length_of(sample.id) for sample in left) > 1.3 * mean
    while each.run.alive:
        each.step(may_open=False)
    assert sorted(flat(each.trained)) == sorted(flat(each.opened))


def test_the_metrics_are_the_true_means_though_many_of_the_opened_are_unfinished():
    """After three steps, when the trained samples are 0.84 times as long as the opened ones: those
    within 3 % on the mean of six runs, as far as the longest length seen (0.7 % measured), and the
    trained ones exactly. Fails when unfinished samples are left out, or taken for finished.
    """
    read, true, trained = [], [], []
    for seed in SEEDS:
        each = trial(seed, 3.0, num_groups=16)
        for _ in range(3):
            collection = each.step()
        read.append(collection.metrics.read())
        longest = max(flat(each.trained) + [sample.num_tokens for sample in each.run.alive])
        true.append(fmean(min(length, longest) for length in flat(each.opened)))
        trained.append(fmean(flat(each.trained)))
        assert read[-1]["length_bias/trained_tokens_mean"] == trained[-1]
    opened = fmean(metrics["length_bias/opened_tokens_mean"] for metrics in read)
    assert opened == pytest.approx(fmean(true), rel=0.03)
    assert fmean(trained) < 0.85 * fmean(true)


def test_rewards_are_counted_with_and_without_what_the_filter_rejects_over_the_window():
    """Against a count of every scored group of the last 20 steps. Fails when rejected groups are
    left out or ones without a reward are not, when groups are counted in the step that opened
    them, or the window has no end.
    """
    failing = frozenset({7, 61})  # before the window and in it
    run = Run(Setup(num_groups=4, group_size=2, alpha=2.0, reject_every=3, failing=failing))
    scored_in: list[list[int]] = []
    known: set[int] = set()
    trained: list[list[float]] = []
    for _ in range(25):
        collection = run.step()
        groups = collection.groups
        ended = {scored.group.prompt.id for scored in run.trained + run.rejected}
        ended |= {scored.group.prompt.id for scored in run.buffer.ready_groups()}
        scored_in.append(sorted(ended - known))
        known |= ended
        trained.append([value for scored in groups for value in scored.rewards])
    read = collection.metrics.read()
    ids = [prompt_id for step in scored_in[-20:] for prompt_id in step]
    rewards = [reward(SampleId(prompt_id, index)) for prompt_id in ids for index in range(2)]
    assert run.rejected
    assert run.num_dropped() == 2
    assert read["length_bias/scored_reward_mean"] == pytest.approx(fmean(rewards))
    of_trained = [value for step in trained[-20:] for value in step]
    assert read["length_bias/trained_reward_mean"] == pytest.approx(fmean(of_trained))


def test_before_anything_is_finished_there_are_no_metrics():
    """Fails when a mean of nothing is logged as a number."""
    bias = LengthBias(2)
    assert dict(bias.metrics(Buffer(2))) == {}
    bias.add(GroupEvents())
    assert dict(bias.metrics(Buffer(2))) == {}


def test_groups_that_were_opened_before_the_window_do_not_count_as_opened():
    """Finished or not. Fails when a long response that the window only finishes, or still waits
    for, counts as one that it opened.
    """
    bias, buffer = LengthBias(1, window_steps=2), Buffer(1)
    grown = [buffer.open(replace(PROMPT, id=prompt_id)) for prompt_id in (0, 1)]
    for group in grown:
        group.lengths = [90]
    for prompt_id in (2, 3, 4):
        settled = Settled(prompt_id, GroupState.ready, [prompt_id], [1.0])
        late = Settled(1, GroupState.rejected, [95], [0.0])
        bias.add(GroupEvents(opened=[prompt_id], settled=[settled, late][: prompt_id - 2]))
    read = bias.metrics(buffer).read()
    assert read["length_bias/opened_tokens_mean"] == 3.5
    assert read["length_bias/scored_reward_mean"] == pytest.approx(2 / 3)


LENGTHS = st.lists(st.integers(0, 12), max_size=12)


@given(LENGTHS, LENGTHS)
def test_the_restricted_mean_is_the_area_under_the_product_limit_curve(finished, unfinished):
    """Against the textbook's product over distinct lengths, summed token by token. Fails when an
    unfinished sample of the same length leaves before a finished one, or the risk set is off by
    one.
    """
    survival, area = 1.0, 0.0
    for position in range(max(finished + unfinished, default=0)):
        at_risk = sum(length >= position for length in finished + unfinished)
        survival *= 1 - finished.count(position) / at_risk
        area += survival
    assert restricted_mean(finished, unfinished) == pytest.approx(area)


def test_the_restricted_mean_is_right_under_random_censoring():
    """Exponential lengths of mean 50, cut off at exponential times of mean 100: 49.9 where the mean
    of the finished ones is 33.5. Fails when the unfinished ones are not at risk until they are cut.
    """
    rng = np.random.default_rng(0)
    lengths, cuts = rng.exponential(50, 20_000), rng.exponential(100, 20_000)
    is_finished = lengths <= cuts
    found = restricted_mean(lengths[is_finished], cuts[~is_finished])
    assert found == pytest.approx(50, rel=0.03)
    assert lengths[is_finished].mean() < 35
