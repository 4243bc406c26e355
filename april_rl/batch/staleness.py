"""How old tokens are when they are trained."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from april_rl.metrics import Max, Mean, Metrics, Sum
from april_rl.types import Sample

# Upper ends of the length buckets, as shares of the response budget, and their names in keys.
_BUCKETS = ((1 / 8, "to_1_8"), (1 / 4, "to_1_4"), (1 / 2, "to_1_2"), (1.0, "to_1"))


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


def staleness_by_length(
    ages: NDArray[np.int32], lengths: NDArray[np.int64], *, max_response_tokens: int
) -> Metrics:
    """`staleness/off_policy_token_frac_len_*` and `staleness/age_mean_len_*`, where responses of
    that length were trained.

    `ages` [tokens] over all samples, one behind the other; `lengths` [samples], their response
    tokens. The buckets are responses of up to 1/8, 1/4, 1/2 and all of `max_response_tokens`, each
    from where the one before ends.
    """
    ends = [share * max_response_tokens for share, _ in _BUCKETS[:-1]]
    bucket = np.repeat(np.searchsorted(ends, lengths), lengths)  # [tokens]
    size = len(_BUCKETS)
    counts = np.bincount(bucket, minlength=size)
    totals = {
        "off_policy_token_frac": np.bincount(bucket, weights=ages > 0, minlength=size),
        "age_mean": np.bincount(bucket, weights=ages, minlength=size),
    }
    return Metrics(
        {
            f"staleness/{quantity}_len_{name}": Mean(float(total[i]), float(counts[i]))
            for quantity, total in totals.items()
            for i, (_, name) in enumerate(_BUCKETS)
            if counts[i]
        }
    )
