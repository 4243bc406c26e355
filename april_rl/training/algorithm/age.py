"""Lower the loss of a token by its age.

Legend: [R] response tokens of a sample. Age: the policy version that trains a token minus the one
that sampled it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

WeightOfAge = Callable[[int], float]


def decay(factor: float) -> WeightOfAge:
    """Return the weight function factor ** age. A factor of 1 changes nothing; with 0 only tokens
    of age 0 are trained.
    """
    return lambda age: factor**age


def age_weights(ages: NDArray[np.int32], *, weight_of_age: WeightOfAge) -> NDArray[np.float32]:
    """Return weight_of_age(age) for each token [R], calling it once for each distinct age.

    Raises ValueError if it returns anything but a number >= 0.
    """
    met, places = np.unique(ages, return_inverse=True)
    table = np.asarray([_weight(int(age), weight_of_age) for age in met], np.float32)
    weights: NDArray[np.float32] = table[places]
    return weights


def _weight(age: int, weight_of_age: WeightOfAge) -> float:
    weight = weight_of_age(age)
    if not (np.isfinite(weight) and 0 <= weight <= np.finfo(np.float32).max):
        raise ValueError(f"the weight of age {age} must be a number >= 0, got {weight}")
    return weight
