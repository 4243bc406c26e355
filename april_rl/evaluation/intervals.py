"""95 % intervals of figures over prompts, and differences of two evaluations.

The k samples of a prompt are one cluster: they share its difficulty, so prompts are resampled, not
samples (Miller 2024, arXiv 2411.00640). More samples make the value of a prompt steadier; only more
prompts make the set larger.

Legend: [P] prompts.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

CONFIDENCE = 0.95
_NUM_RESAMPLES = 10_000
_SEED = 0  # the same figures give the same interval
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

    Values that are all 0 or 1, as with one sample a prompt, are a proportion and get Wilson's
    interval, which also holds for few prompts and at the ends, where resampling gives zero width
    (Bowyer et al. 2025, arXiv 2503.01747). All others get the percentile bootstrap.
    """
    found = np.asarray(values, dtype=np.float64)
    if np.all((found == 0) | (found == 1)):
        return Estimate(float(found.mean()), *wilson(int(found.sum()), len(found)))
    return Estimate(float(found.mean()), *bootstrap(found))


def paired_difference(first: ArrayLike, second: ArrayLike) -> Estimate:
    """Return the mean of second - first over the same prompts [P], by the paired bootstrap.

    The difficulty of a prompt cancels, so this detects smaller differences than a comparison of two
    intervals (Miller 2024).
    """
    differences = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    return Estimate(float(differences.mean()), *bootstrap(differences))


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Return Wilson's interval of a proportion (Wilson 1927, "Probable inference, the law of
    succession, and statistical inference").
    """
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    share = successes / trials
    middle = share + z**2 / (2 * trials)
    half = z * (share * (1 - share) / trials + z**2 / (4 * trials**2)) ** 0.5
    scale = 1 + z**2 / trials
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
