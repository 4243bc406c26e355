"""From a checked configuration to what is learned from a batch: advantages, loss weights, the loss
and the optimizer.
"""

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
from april_rl.config.choices import Advantage, Aggregation, Offload
from april_rl.runtime.age_weight import AgeWeights, load_age_weights
from april_rl.runtime.preflight import pick_device
from april_rl.runtime.settings import LearnerSettings, LoraSettings

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


def learner_settings(config: TrainConfig) -> LearnerSettings:
    """Model, precision and optimizer."""
    optimizer, learner = config.optimizer, config.learner
    return LearnerSettings(
        model_path=config.model.path,
        compute_dtype=learner.compute_dtype.name,
        activation_checkpointing=learner.activation_checkpointing,
        shard_size=learner.shard_size,
        offload=_offload(config),
        temperature=config.rollout.temperature,
        lr=optimizer.lr,
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        warmup_steps=optimizer.warmup_steps,
        schedule=optimizer.schedule.name,
        num_steps=config.trainer.num_steps * config.trainer.num_minibatches,
        max_mismatch=learner.max_mismatch,
    )


def _offload(config: TrainConfig) -> str:
    """On CPU nothing leaves: the host's memory is the learner's own."""
    is_on_cpu = pick_device(config.runtime.device.name) == "cpu"
    return Offload.none.name if is_on_cpu else config.learner.offload.name


def lora_settings(config: TrainConfig) -> LoraSettings | None:
    """The adapters; None when the whole model is trained."""
    lora = config.lora
    if lora.rank == 0:
        return None
    return LoraSettings(
        rank=lora.rank,
        alpha=lora.alpha,
        target_modules=None if lora.target_modules is None else tuple(lora.target_modules),
        seed=config.seed,
    )
