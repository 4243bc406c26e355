"""Rewards of one group to advantages, one for each sample.

Legend: [G] samples of a group.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

STD_EPS = 1e-6  # keeps a group of almost equal rewards finite


def grpo(rewards: ArrayLike) -> NDArray[np.float64]:
    """(reward - mean) / (std + 1e-6) [G]; Shao et al. 2024 (DeepSeekMath), section 4.1.2.

    The standard deviation is the sample one (divisor G - 1), as in TRL, verl and slime: learning
    rates found with them carry over; with G = 8 the population one would make every advantage 7 %
    larger. Zeros for equal rewards, and for a group of one.
    """
    centred = dr_grpo(rewards)
    if not centred.any():
        return centred
    scale = float(np.std(centred, ddof=1)) + STD_EPS
    return centred / scale


def dr_grpo(rewards: ArrayLike) -> NDArray[np.float64]:
    """reward - mean [G]; Liu et al. 2025 (Dr. GRPO), section 3.2.

    Undivided, hard and easy prompts keep the weight their spread gives them. Exactly zeros for
    equal rewards, which rounding of the mean would not give.
    """
    values = np.asarray(rewards, dtype=np.float64)
    assert values.ndim == 1, values.shape
    assert values.size > 0, "a group without samples"
    if np.all(values == values[0]):
        return np.zeros_like(values)
    centred: NDArray[np.float64] = values - values.mean()
    return centred
