"""Compare the lengths of trained responses with the lengths of all opened ones."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from statistics import NormalDist, fmean

import numpy as np
import pytest
from fake_engine import LengthDistribution
from rollout_runs import Run, Setup

from april_rl.training.rollout.collector import Collection
from april_rl.training.rollout.requests import request_seed
from april_rl.types import SampleId

BUDGET = 60
SEEDS, STEPS = range(12), 36
STEADY_FROM = 12  # two full cycles of the staleness cap, which is five versions
ALPHAS = [1.0, 3.0]


def lognormal_of(seed: int) -> LengthDistribution:
    """Return lengths drawn for each sample independently: median 6, long tail, at most
    the budget.
    """

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

    def step(self) -> Collection:
        taken = len(self.run.prompts.taken)
        collection = self.run.step()
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
    found = [trial(seed, alpha) for seed in SEEDS]
    for each in found:
        for _ in range(STEPS):
            each.step()
    return found


def flat(rows: Sequence[Sequence[int]]) -> list[int]:
    return [length for row in rows for length in row]


def largest_difference(some: Sequence[int], others: Sequence[int]) -> float:
    """Return the largest difference between the two cumulative distributions: the
    Kolmogorov-Smirnov statistic.
    """
    grid = np.arange(BUDGET + 1)
    shares = [np.searchsorted(np.sort(x), grid, side="right") / len(x) for x in (some, others)]
    return float(np.abs(shares[0] - shares[1]).max())


@pytest.mark.slow
@pytest.mark.parametrize("alpha", ALPHAS)
def test_in_steady_state_trained_lengths_have_the_distribution_of_opened_ones(alpha):
    """Steps 13 to 36 of twelve seeds: 9,216 trained samples against all that these steps opened.

    Largest difference of the two distributions (tolerated: 0.02) and ratio of their means (3 %):
    alpha 1: 0.002, 0.995. alpha 1.5: 0.002, 0.997. alpha 2: 0.003, 0.997. alpha 3: 0.006, 1.004.
    Fails when samples that were long at the abort are dropped. An order that favours short ones
    cannot show here while every group is trained within the cap (test_collector_invariants.py).
    """
    found = trials(alpha)
    trained = flat([row for each in found for row in each.trained[STEADY_FROM:]])
    opened = flat([row for each in found for row in each.opened[STEADY_FROM:]])
    assert largest_difference(trained, opened) < 0.02
    assert fmean(trained) == pytest.approx(fmean(opened), rel=0.03)


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
