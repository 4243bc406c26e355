"""From a checked configuration to the packer: what each token counts in the loss."""

from __future__ import annotations

from functools import partial

from april_rl.algorithm.age import age_weights, decay
from april_rl.algorithm.aggregation import aggregate
from april_rl.batch.packing import Packer
from april_rl.config import TrainConfig
from april_rl.runtime.age_weight import AgeWeights, load_age_weights


def build_packer(config: TrainConfig, *, num_ranks: int, hidden_size: int) -> Packer:
    """The packer; raises RunError when learner.age_weight names no function that can be used."""
    budget = config.rollout.max_response_tokens
    return Packer(
        num_ranks=num_ranks,
        max_tokens=config.learner.max_tokens,
        num_minibatches=config.trainer.num_minibatches,
        max_staleness=config.rollout.max_staleness,
        max_response_tokens=budget,
        age_weights=_age_weights(config),
        aggregation=aggregate(config.algorithm.aggregation, max_response_tokens=budget),
        hidden_size=hidden_size,
    )


def _age_weights(config: TrainConfig) -> AgeWeights:
    learner = config.learner
    if learner.age_weight is None:
        return partial(age_weights, weight_of_age=decay(learner.age_decay))
    return load_age_weights(learner.age_weight, max_staleness=config.rollout.max_staleness)
