"""Ages of tokens when they are trained."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from april_rl.metrics import Histogram, Max, Mean, Metrics, Sum
from april_rl.types import Sample

# Upper ends of the length buckets, as shares of the response budget, and their names in keys.
_BUCKETS = ((1 / 8, "to_1_8"), (1 / 4, "to_1_4"), (1 / 2, "to_1_2"), (1.0, "to_1"))


def sample_ages(sample: Sample, *, policy_version: int) -> NDArray[np.int32]:
    """Return [R], the age of each token of a sample: `policy_version` minus the version that
    sampled it.
    """
    versions = [c.policy_version for c in sample.completions]
    ages = np.repeat(np.asarray(versions, np.int32), [len(c.token_ids) for c in sample.completions])
    ages = policy_version - ages
    assert ages.size == 0 or ages.min() >= 0, f"sample {sample.id} has tokens of a later version"
    return ages.astype(np.int32)


def comparable(sample: Sample, *, policy_version: int) -> NDArray[np.bool_]:
    """Return [R], whether each token was sampled by `policy_version` on a KV cache of that version
    alone.

    Only for such a token does the learner's log-probability always equal the engine's up to
    rounding.
    """
    contexts = [c.context_version == policy_version for c in sample.completions]
    return np.repeat(np.asarray(contexts, np.bool_), [len(c.token_ids) for c in sample.completions])


def num_versions(sample: Sample) -> int:
    """Return how many policy versions sampled tokens of a sample."""
    return len({c.policy_version for c in sample.completions if len(c.token_ids)})


def staleness_metrics(
    ages: NDArray[np.int32],
    is_fresh: NDArray[np.bool_],
    weights: NDArray[np.float32],
    *,
    max_staleness: int,
) -> Metrics:
    """Return `staleness/*` over all response tokens of a batch [tokens], at the time they are
    trained; `is_fresh` comes from `comparable`.
    """
    count = float(len(ages))
    by_age = np.bincount(ages, minlength=max_staleness + 1)
    return Metrics(
        {
            "staleness/age_mean": Mean(float(ages.sum()), count),
            "staleness/age_max": Max(float(ages.max(initial=0))),
            "staleness/off_policy_token_frac": Mean(float((ages > 0).sum()), count),
            "staleness/old_cache_token_frac": Mean(float(((ages == 0) & ~is_fresh).sum()), count),
            "staleness/masked_tokens": Sum(float((ages > max_staleness).sum())),
            **{
                f"staleness/token_frac_age_{age}": Mean(float(n), count)
                for age, n in enumerate(by_age)
            },
            "histogram/age": Histogram(
                tuple(map(float, range(len(by_age) + 1))), tuple(map(float, by_age))
            ),
            "loss/age_weight_mean": Mean(float(weights.sum(dtype=np.float64)), count),
        }
    )


def staleness_by_length(
    ages: NDArray[np.int32], lengths: NDArray[np.int64], *, max_response_tokens: int
) -> Metrics:
    """Return `staleness/off_policy_token_frac_len_*` and `staleness/age_mean_len_*` for the length
    buckets that have trained responses.

    `ages` [tokens] concatenates all samples; `lengths` [samples] are their response tokens. The
    buckets end at 1/8, 1/4, 1/2 and all of `max_response_tokens`; each begins where the previous
    one ends.
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
