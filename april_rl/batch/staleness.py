"""How old tokens are when they are trained."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from april_rl.metrics import Max, Mean, Metrics, Sum
from april_rl.types import Sample


def sample_ages(sample: Sample, *, policy_version: int) -> NDArray[np.int32]:
    """[R] versions between the policy that sampled each token and `policy_version`, which trains
    it.
    """
    versions = [c.policy_version for c in sample.completions]
    ages = np.repeat(np.asarray(versions, np.int32), [len(c.token_ids) for c in sample.completions])
    ages = policy_version - ages
    assert ages.size == 0 or ages.min() >= 0, f"sample {sample.id} has tokens of a later version"
    return ages.astype(np.int32)


def comparable(sample: Sample, *, policy_version: int) -> NDArray[np.bool_]:
    """[R] whether a token was sampled by `policy_version` on a KV cache of that version alone.

    The learner's log-probability of such a token is the engine's, but for rounding; of a fresh
    token on an older cache it need not be.
    """
    contexts = [c.context_version == policy_version for c in sample.completions]
    return np.repeat(np.asarray(contexts, np.bool_), [len(c.token_ids) for c in sample.completions])


def staleness_metrics(
    ages: NDArray[np.int32], weights: NDArray[np.float32], *, max_staleness: int
) -> Metrics:
    """`staleness/*` over all response tokens of a batch [tokens], counted when they are trained."""
    count = float(len(ages))
    by_age = np.bincount(ages, minlength=max_staleness + 1)
    return Metrics(
        {
            "staleness/age_mean": Mean(float(ages.sum()), count),
            "staleness/age_max": Max(float(ages.max(initial=0))),
            "staleness/off_policy_token_frac": Mean(float((ages > 0).sum()), count),
            "staleness/masked_tokens": Sum(float((ages > max_staleness).sum())),
            **{
                f"staleness/token_frac_age_{age}": Mean(float(n), count)
                for age, n in enumerate(by_age)
            },
            "loss/age_weight_mean": Mean(float(weights.sum(dtype=np.float64)), count),
        }
    )
