"""Statistics of response lengths: their distribution when some are unfinished, and whether batches
differ more from each other than random draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_FEWEST_BATCHES = 10  # batches needed for a dispersion
_NEIGHBOURS = 5  # window of the running mean that a batch is compared with, centred on it


def survival(
    finished: ArrayLike, unfinished: ArrayLike
) -> tuple[NDArray[Any], NDArray[np.floating[Any]]]:
    """Return the distinct `finished` lengths [D] in rising order, and the share of all samples [D]
    that is longer, given samples `finished` [F] and lower bounds `unfinished` [U].

    It is the product-limit estimate (Kaplan & Meier 1958). Leaving out the unfinished samples, or
    taking them as finished, would give lengths that are too short.
    """
    ends, num_ended = np.unique(np.asarray(finished), return_counts=True)
    cuts = np.sort(np.asarray(unfinished, float))
    # Samples of at least this length, counting unfinished ones of exactly this length.
    at_risk = num_ended[::-1].cumsum()[::-1] + len(cuts) - np.searchsorted(cuts, ends)
    return ends, np.cumprod(1 - num_ended / at_risk)


def restricted_mean(finished: ArrayLike, unfinished: ArrayLike) -> float:
    """Return the mean length, given samples `finished` [F] and lower bounds `unfinished` [U].

    It is the area under the `survival` curve up to the longest length seen, so lengths above that
    are left out; 0 without samples.
    """
    ends, longer = survival(finished, unfinished)
    longest = max(np.max(ends, initial=0.0), np.max(unfinished, initial=0.0))
    edges = np.concatenate([[0.0], ends, [longest]])
    return float((np.concatenate([[1.0], longer]) * np.diff(edges)).sum())


def dispersion(batches: Sequence[Sequence[float]]) -> float | None:
    """Return the standard deviation of the batches' means around their running mean, divided by its
    expected value if every batch were drawn at random: the standard deviation of the values over
    the root of a batch's size. 1 is a random draw. None with too few batches to tell, or when all
    values are equal.

    The running mean over neighbouring steps takes out what changes slowly: a policy whose responses
    grow longer is not mistaken for a schedule that sorts them.
    """
    filled = [np.asarray(batch, float) for batch in batches if batch]
    if len(filled) < _FEWEST_BATCHES or np.ptp(np.concatenate(filled)) == 0:
        return None
    means = np.array([batch.mean() for batch in filled])
    level = np.convolve(means, np.full(_NEIGHBOURS, 1 / _NEIGHBOURS), "valid")
    edge = _NEIGHBOURS // 2
    inner = filled[edge:-edge]
    values = np.concatenate([batch - mean for batch, mean in zip(inner, level, strict=True)])
    expected = values.var() * len(inner) / len(values)
    # A value deviates less from a running mean that includes it than from an independent mean.
    found = np.square(means[edge:-edge] - level).mean() / (1 - 1 / _NEIGHBOURS)
    return float(np.sqrt(found / expected)) if expected else None


def waitless_staleness(factor: float, *, longest: float, mean: float) -> int:
    """Return the smallest `max_staleness` at which no step waits for its oldest groups.

    A step trains N·G samples of `mean` tokens, and full slots generate α·N·G tokens per engine
    step. So a step lasts mean ÷ α engine steps, and a response of `longest` tokens takes α ·
    longest ÷ mean steps.
    """
    return math.ceil(round(factor * longest / mean, 6))
