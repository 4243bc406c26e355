"""The user's weight of a token's age, asked once for every age that can be trained."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from april_rl.algorithm.age import WeightOfAge, age_weights
from april_rl.errors import RunError
from april_rl.rewards.caught import Caught

AgeWeights = Callable[[NDArray[np.int32]], NDArray[np.float32]]


class AgeWeightError(RunError):
    """The function in learner.age_weight cannot be used."""


def load_age_weights(function: str, *, max_staleness: int) -> AgeWeights:
    """Of ages [R] from 0 to `max_staleness`, what `function` (module:function) says of each.

    It is called here and never again, once for each age. Raises AgeWeightError when it cannot be
    imported, raises, or gives anything but a number >= 0.
    """
    weight_of_age = _load(function)
    ages = np.arange(max_staleness + 1, dtype=np.int32)
    table = ages.astype(np.float32)
    with Caught() as caught:
        table = age_weights(ages, weight_of_age=weight_of_age)
    if caught.message:
        raise AgeWeightError(
            f"learner.age_weight={function} failed when called with the ages 0 to "
            f"{max_staleness} as a test: {caught.message}"
        )
    if not table[0] > 0:
        raise AgeWeightError(
            f"learner.age_weight={function} gives age 0 the weight {table[0]:g}: fresh tokens "
            "would not be trained"
        )
    return partial(np.take, table)


def _load(function: str) -> WeightOfAge:
    module, _, name = function.partition(":")
    found: object = None
    with Caught() as caught:
        found = vars(importlib.import_module(module)).get(name)
    if caught.message:
        raise AgeWeightError(f"learner.age_weight={function} cannot be loaded: {caught.message}")
    if not callable(found):
        raise AgeWeightError(
            f"learner.age_weight={function}: module {module} has no function {name!r}"
        )
    return found
