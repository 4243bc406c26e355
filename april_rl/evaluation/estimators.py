"""avg@k and pass@k from the number of right samples of each prompt."""

from __future__ import annotations

from math import comb

import numpy as np
from numpy.typing import ArrayLike


def avg_at_k(rewards: ArrayLike) -> float:
    """The mean reward over prompts and samples; `rewards` [prompts, k]."""
    return float(np.mean(np.asarray(rewards, dtype=np.float64)))


def pass_at_k(rewards: ArrayLike, *, k: int) -> float:
    """The unbiased chance that at least one of k samples is right; `rewards` [prompts, n], n >= k.

    Mean over prompts of 1 - C(n - c, k) / C(n, k) with c right ones (Chen et al. 2021, eq. 1). A
    sample is right when its reward is above 0.5.
    """
    right = (np.asarray(rewards, dtype=np.float64) > 0.5).sum(axis=1)
    n = np.asarray(rewards).shape[1]
    if n < k:
        raise ValueError(f"pass@{k} needs at least {k} samples of each prompt, got {n}")
    return float(np.mean([1.0 - comb(n - int(c), k) / comb(n, k) for c in right]))
