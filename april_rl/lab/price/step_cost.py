"""Seconds of the parts of a step that are not its rollout: update, weight sync, sleep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from april_rl.config.choices import Kl, Offload, Ratio
from april_rl.lab.price.memory import RealMemory
from april_rl.lab.simulator.gpu_kinds import Rates
from april_rl.lab.simulator.model_cost import Shape
from april_rl.training.learner.model.sizes import ModelSizes

_ATTENTION_PASSES = 3.5  # forward 1, backward 2.5: FlashAttention computes its scores again
_HOST_BYTES_PER_S = 40e9  # a GPU's weights and optimizer to pinned memory: an H200 reached 38 to 49
_REST_S, _SLEEP_S = 0.4, 1.0  # packing and the controller; falling asleep and waking
_EXPERTS_REACHED = 1 / 3  # of the speed of an update of a model without experts
# Of a parameter for each row: weights for the forward and the backward pass, gradients.
_FSDP_BYTES = 2 + 2 + 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTokens:
    """The tokens that a step trains, and the pairs that their attention computes."""

    num_tokens: float
    num_pairs: float  # of a token and one before it

    @classmethod
    def of(
        cls, lengths: Sequence[float], *, prompt_tokens: float, num_samples: int
    ) -> TrainedTokens:
        """Return the tokens of `num_samples` samples with responses like `lengths` [n]."""
        tokens = [length + prompt_tokens for length in lengths]
        return cls(
            num_tokens=num_samples * fmean(tokens),
            num_pairs=num_samples * fmean(length**2 for length in tokens) / 2,
        )


def update_s(
    shape: Shape,
    trained: TrainedTokens,
    memory: RealMemory,
    *,
    rates: Rates,
    critic: ModelSizes | None = None,
) -> float:
    """Return the seconds of an update: FLOPs at the speed of the update or, where it takes longer,
    FSDP's traffic over the link.

    A forward pass takes 2 FLOPs per parameter and token, a backward pass 4, or 2 for frozen
    weights; each attention 4 per number of its output and pair. Balance between ranks is left out.
    """
    config = memory.config
    products = 2 * shape.num_multiplied * trained.num_tokens
    attention = shape.attention_flops * trained.num_pairs
    passes = 3 if config.lora.rank is None else 2
    again = memory.inputs.recomputed_share
    kept = 0 if memory.inputs.keeps_attention else again
    flops = (passes + again) * products + (_ATTENTION_PASSES + kept) * attention
    flops *= config.trainer.num_passes
    forward = 0.0  # forward passes before the update
    if config.algorithm.ratio is Ratio.proximal:
        forward = 1 - 1 / config.trainer.num_minibatches  # none for the first minibatch
    if config.algorithm.kl is not Kl.none:
        forward += 1
    flops += forward * (products + attention)
    if critic is not None:
        flops += 4 * 2 * critic.num_parameters * trained.num_tokens + 4.5 * attention
    workers = memory.layout.num_workers
    rows = trained.num_tokens / workers / memory.inputs.learner.max_tokens
    traffic = _FSDP_BYTES if config.lora.rank is None else _FSDP_BYTES / 2
    traffic *= rows * config.trainer.num_passes * shape.num_parameters * (1 - 1 / workers)
    speed = rates.update_flops_per_s * (_EXPERTS_REACHED if shape.expert_parameters else 1)
    return max(flops / speed / workers, traffic / rates.link_bytes_per_s)


def rest_s(shape: Shape, memory: RealMemory, rates: Rates) -> float:
    """Return the seconds of a step for the weight sync, offloads, and what else is not counted."""
    per_parameter = {Offload.none: 0, Offload.optimizer: 8, Offload.all: 12}
    moved = 2 * per_parameter[memory.config.learner.offload] * shape.num_parameters
    sync_s = 2 * shape.num_parameters / rates.sync_bytes_per_s
    sleep_s = _SLEEP_S if memory.inputs.engine_sleeps else 0
    return sync_s + moved / memory.layout.num_workers / _HOST_BYTES_PER_S + sleep_s + _REST_S
