"""Build the packer from a checked configuration: the weight of each token in the loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from april_rl.config import TrainConfig
from april_rl.config.choices import Advantage
from april_rl.config.user_code import Hook, OwnFunctionError
from april_rl.training.algorithm.age import age_weights, decay
from april_rl.training.algorithm.aggregation import aggregate
from april_rl.training.batch.packing import Packer

AgeWeights = Callable[[NDArray[np.int32]], NDArray[np.float32]]


def build_packer(config: TrainConfig, *, num_ranks: int, hidden_size: int) -> Packer:
    """Return the packer. Raise OwnFunctionError when learner.age_weight cannot be used."""
    learner, budget = config.learner, config.rollout.max_response_tokens
    weigh: AgeWeights = partial(age_weights, weight_of_age=decay(learner.age_decay))
    if learner.age_weight is not None:
        weigh = load_age_weights(learner.age_weight, max_staleness=config.rollout.max_staleness)
    return Packer(
        num_ranks=num_ranks,
        max_tokens=learner.max_tokens,
        num_minibatches=config.trainer.num_minibatches,
        max_staleness=config.rollout.max_staleness,
        max_response_tokens=budget,
        age_weights=weigh,
        aggregation=aggregate(config.algorithm.aggregation, max_response_tokens=budget),
        hidden_size=hidden_size,
        mask_truncated=config.algorithm.mask_truncated,
        has_critic=config.algorithm.advantage == Advantage.gae,
    )


def load_age_weights(function: str, *, max_staleness: int) -> AgeWeights:
    """Return the weights that `function` (module:function) gives to ages 0 to `max_staleness`.

    The function is called here, once for each age, and never again. Raise OwnFunctionError when it
    cannot be imported, raises, or returns anything but a number >= 0.
    """
    hook, ages = Hook("learner.age_weight", function), np.arange(max_staleness + 1, dtype=np.int32)
    weight_of_age = hook.load("age")
    table = hook.call(
        lambda: age_weights(ages, weight_of_age=weight_of_age),
        f"failed when called with the ages 0 to {max_staleness} as a test",
    )
    if not table[0] > 0:
        raise OwnFunctionError(
            f"{hook} gives age 0 the weight {table[0]:g}: fresh tokens would not be trained"
        )
    return partial(np.take, table)
