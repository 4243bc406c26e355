"""From a checked configuration to what is learned from a batch: advantages and loss weights."""

from __future__ import annotations

from functools import partial

from april_rl.algorithm.advantages import (
    BatchAdvantages,
    by_group,
    dr_grpo,
    grpo,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
)
from april_rl.algorithm.age import age_weights, decay
from april_rl.algorithm.aggregation import Aggregation as Aggregate
from april_rl.algorithm.aggregation import constant_length, sequence_mean, token_mean
from april_rl.batch.packing import Packer
from april_rl.config import TrainConfig
from april_rl.config.choices import Advantage, Aggregation
from april_rl.runtime.age_weight import AgeWeights, load_age_weights

ADVANTAGES: dict[Advantage, BatchAdvantages] = {
    Advantage.grpo: by_group(grpo),
    Advantage.dr_grpo: by_group(dr_grpo),
    Advantage.rloo: by_group(rloo),
    Advantage.reinforce_pp: reinforce_pp,
    Advantage.reinforce_pp_baseline: reinforce_pp_baseline,
}


def build_packer(config: TrainConfig, *, num_ranks: int, hidden_size: int) -> Packer:
    """The packer; raises RunError when learner.age_weight names no function that can be used."""
    return Packer(
        num_ranks=num_ranks,
        max_tokens=config.learner.max_tokens,
        num_minibatches=config.trainer.num_minibatches,
        max_staleness=config.rollout.max_staleness,
        max_response_tokens=config.rollout.max_response_tokens,
        age_weights=_age_weights(config),
        aggregation=_aggregation(config),
        hidden_size=hidden_size,
    )


def _age_weights(config: TrainConfig) -> AgeWeights:
    learner = config.learner
    if learner.age_weight is None:
        return partial(age_weights, weight_of_age=decay(learner.age_decay))
    return load_age_weights(learner.age_weight, max_staleness=config.rollout.max_staleness)


def _aggregation(config: TrainConfig) -> Aggregate:
    budget = config.rollout.max_response_tokens
    chosen: dict[Aggregation, Aggregate] = {
        Aggregation.token_mean: token_mean,
        Aggregation.sequence_mean: sequence_mean,
        Aggregation.constant_length: partial(constant_length, max_response_tokens=budget),
    }
    return chosen[config.algorithm.aggregation]
