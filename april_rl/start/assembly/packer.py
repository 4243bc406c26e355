"""Build what makes the batch of a step: credits of samples, and the weight of each token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from april_rl.config import TrainConfig
from april_rl.config.user_code import Hook, OwnFunctionError
from april_rl.start.assembly.own_algorithm import load_advantages
from april_rl.start.planning.plan import Plan
from april_rl.training.algorithm.advantages import credits_of
from april_rl.training.algorithm.age import age_weights, decay
from april_rl.training.algorithm.aggregation import aggregate
from april_rl.training.batch.packing import Packer
from april_rl.training.batches import AskTeacher, Batches
from april_rl.training.learner.model.sizes import ModelSizes

AgeWeights = Callable[[NDArray[np.int32]], NDArray[np.float32]]


def build_batches(plan: Plan, model: ModelSizes, ask_teacher: AskTeacher | None) -> Batches:
    """Return the maker of batches for the workers of a plan."""
    config = plan.config
    num_ranks = plan.layout.num_workers
    packer = build_packer(config, num_ranks=num_ranks, hidden_size=model.hidden_size)
    own = load_advantages(config.algorithm)
    credits_ = own or credits_of(config.algorithm.advantage, config.reward)
    return Batches(config, packer, credits_, ask_teacher)


def build_packer(config: TrainConfig, *, num_ranks: int, hidden_size: int) -> Packer:
    """Return the packer. Raise OwnFunctionError when learner.age_weight cannot be used."""
    learner, budget = config.learner, config.rollout.max_response_tokens
    return Packer(
        num_ranks=num_ranks,
        max_tokens=learner.max_tokens,
        num_minibatches=config.trainer.num_minibatches,
        max_staleness=config.rollout.max_staleness,
        max_response_tokens=budget,
        age_weights=load_age_weights(config),
        aggregation=aggregate(config.algorithm.aggregation, max_response_tokens=budget),
        hidden_size=hidden_size,
        mask_truncated=config.algorithm.mask_truncated,
    )


def load_age_weights(config: TrainConfig) -> AgeWeights:
    """Return the weights of ages, by learner.age_decay or by the user's learner.age_weight. That is
    called here, once for each age up to rollout.max_staleness, and never again. Raise
    OwnFunctionError when it cannot be used, or returns anything but a number >= 0.
    """
    function, max_staleness = config.learner.age_weight, config.rollout.max_staleness
    if function is None:
        return partial(age_weights, weight_of_age=decay(config.learner.age_decay))
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
