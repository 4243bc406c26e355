"""95 % intervals of figures over prompts, and differences of two evaluations.

The k samples of a prompt are one cluster: they share its difficulty, so prompts are resampled, not
samples (Miller 2024, arXiv 2411.00640). More samples make the value of a prompt steadier; only more
prompts make the set larger.

Legend: [P] prompts.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

CONFIDENCE = 0.95
_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_HALVINGS = 60  # halvings of an interval of differences, down to the last bit
_ADDED_PROMPTS = 0.5  # chosen by simulation, docs/evaluation.md
_NUM_RESAMPLES = 10_000
_SEED = 0  # constant, so that the same figures give the same interval
_CHUNK = 1 << 21  # prompts drawn at a time


class Estimate(NamedTuple):
    """A mean over prompts with its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return three decimals, as in 0.512 [0.430, 0.591]."""
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def estimate(values: ArrayLike) -> Estimate:
    """Return the mean of the prompts' values [P] with its interval.

    Values between 0 and 1 get Wilson's interval for the effective number of prompts. Unlike
    resampling, it still has a width when all values are equal, such as all 0 (Bowyer et al. 2025,
    arXiv 2503.01747). With one sample per prompt it is the ordinary Wilson interval. Other rewards
    have no known bounds, so they get the bootstrap.
    """
    found = np.asarray(values, dtype=np.float64)
    mean = float(found.mean())
    if not _is_between_0_and_1(found):
        return Estimate(mean, *bootstrap(found))
    trials = effective_prompts(found, ends=(0.0, 1.0))
    return Estimate(mean, *wilson(mean * trials, trials))


def paired_difference(first: ArrayLike, second: ArrayLike) -> Estimate:
    """Return the mean of second - first over the same prompts [P] with its interval.

    The difficulty of a prompt cancels, so this detects smaller differences than a comparison of two
    intervals (Miller 2024). Values between 0 and 1 get Tango's interval of two paired proportions,
    for the effective number of prompts; a difference of 0.25 counts as a quarter of a prompt
    gained. Other values get the bootstrap over prompts.
    """
    before, after = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    found = after - before
    mean = float(found.mean())
    if not (_is_between_0_and_1(before) and _is_between_0_and_1(after)):
        return Estimate(mean, *bootstrap(found))
    pairs = effective_prompts(found, ends=(-1.0, 1.0))
    gained, lost = np.maximum(found, 0).mean() * pairs, np.maximum(-found, 0).mean() * pairs
    return Estimate(mean, *tango(float(gained), float(lost), pairs))


def effective_prompts(values: NDArray[np.float64], *, ends: tuple[float, float]) -> float:
    """Return how many whole prompts carry as much information as `values` [P]; a whole prompt is
    one whose value is exactly 0 or one of `ends`.

    The result is P × the variance that whole prompts with this mean would have ÷ the variance of
    the values (Korn and Graubard 1998, "Confidence intervals for proportions with small expected
    number of positive counts estimated from survey data"). Both variances include _ADDED_PROMPTS,
    half of them at each end, because a spread measured on few prompts is uncertain, and equal
    values have no spread at all. The result is at least P, and is P when all prompts are whole.
    """
    all_values = np.array([*values, *ends])
    weights = np.array([*np.ones(len(values)), *np.full(2, _ADDED_PROMPTS / 2)])
    square = np.average(all_values, weights=weights) ** 2
    of_whole = np.average(np.abs(all_values), weights=weights) - square
    of_values = np.average(all_values**2, weights=weights) - square
    return len(values) * float(of_whole / of_values)


def _is_between_0_and_1(values: NDArray[np.float64]) -> bool:
    return bool(np.all((values >= 0) & (values <= 1)))


def tango(gained: float, lost: float, pairs: float) -> tuple[float, float]:
    """Return the score interval of the difference of two paired proportions (Tango 1998, Statistics
    in Medicine 17: 891-908). It is valid for few pairs, and if none of them differs.

    `gained` and `lost` count the pairs in which only the second, or only the first, is a success.
    For few pairs it is not an exact test: 4 lost and none gained of 200 exclude 0, where McNemar's
    exact test has p = 0.125.
    """
    found = (gained - lost) / pairs
    high = _farthest(found, 1.0, gained, lost, pairs)
    return -_farthest(-found, 1.0, lost, gained, pairs), high


def _farthest(near: float, far: float, gained: float, lost: float, pairs: float) -> float:
    """Return the largest difference between `near` and `far` that the score test does not reject,
    by bisection.
    """
    for _ in range(_HALVINGS):
        middle = (near + far) / 2
        near, far = (middle, far) if _is_kept(middle, gained, lost, pairs) else (near, middle)
    return near


def _is_kept(difference: float, gained: float, lost: float, pairs: float) -> bool:
    """Return whether the score test does not reject this difference at CONFIDENCE."""
    # The likeliest share of pairs lost under the hypothesis solves a·x² + b·x + c = 0.
    a = 2 * pairs
    b = (2 * pairs - gained + lost) * difference - gained - lost
    c = -lost * difference * (1 - difference)
    share_lost = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)
    variance = pairs * (2 * share_lost + difference * (1 - difference))
    return (gained - lost - pairs * difference) ** 2 <= _Z**2 * variance


def wilson(successes: float, trials: float) -> tuple[float, float]:
    """Return Wilson's interval of a proportion (Wilson 1927, "Probable inference, the law of
    succession, and statistical inference").
    """
    share = successes / trials
    middle = share + _Z**2 / (2 * trials)
    half = _Z * (share * (1 - share) / trials + _Z**2 / (4 * trials**2)) ** 0.5
    scale = 1 + _Z**2 / trials
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def bootstrap(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the percentile interval of the mean of `values` [P] over resampled prompts (Efron
    and Tibshirani 1993, chapter 13).
    """
    rng = np.random.default_rng(_SEED)
    means: list[NDArray[np.float64]] = []
    left, at_once = _NUM_RESAMPLES, max(1, _CHUNK // len(values))
    while left > 0:
        drawn = rng.integers(0, len(values), (min(left, at_once), len(values)))
        means.append(values[drawn].mean(axis=1))
        left -= at_once
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(np.concatenate(means), [tail, 100 - tail])
    return float(low), float(high)
