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
_HALVINGS = 60  # of an interval of differences, to the last bit
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
    """Return the mean of second - first over the same prompts [P] with its interval.

    The difficulty of a prompt cancels, so this detects smaller differences than a comparison of two
    intervals (Miller 2024). Differences that are all -1, 0 or 1, as with one sample a prompt or
    two models that agree, are those of two paired proportions and get Tango's interval; all others
    the bootstrap over prompts.
    """
    differences = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    mean, gained, lost = float(differences.mean()), differences == 1, differences == -1
    if np.all(gained | lost | (differences == 0)):
        return Estimate(mean, *tango(int(gained.sum()), int(lost.sum()), len(differences)))
    return Estimate(mean, *bootstrap(differences))


def tango(gained: int, lost: int, pairs: int) -> tuple[float, float]:
    """Return the score interval of the difference of two paired proportions (Tango 1998,
    Statistics in Medicine 17: 891-908). It holds for few pairs, and where none of them differs.

    `gained` and `lost` count the pairs with only the second or only the first a success.
    """
    found = (gained - lost) / pairs
    high = _farthest(found, 1.0, gained, lost, pairs)
    return -_farthest(-found, 1.0, lost, gained, pairs), high


def _farthest(near: float, far: float, gained: int, lost: int, pairs: int) -> float:
    """Return the largest difference between `near` and `far` that the score test does not reject,
    by bisection.
    """
    for _ in range(_HALVINGS):
        middle = (near + far) / 2
        near, far = (middle, far) if _is_kept(middle, gained, lost, pairs) else (near, middle)
    return near


def _is_kept(difference: float, gained: int, lost: int, pairs: int) -> bool:
    """Return whether the score test keeps the hypothesis of this difference, at CONFIDENCE."""
    # The likeliest share of pairs lost under the hypothesis solves a·x² + b·x + c = 0.
    a = 2 * pairs
    b = (2 * pairs - gained + lost) * difference - gained - lost
    c = -lost * difference * (1 - difference)
    share_lost = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)
    variance = pairs * (2 * share_lost + difference * (1 - difference))
    return (gained - lost - pairs * difference) ** 2 <= _Z**2 * variance


def wilson(successes: int, trials: int) -> tuple[float, float]:
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
