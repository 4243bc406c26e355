"""The cost of an engine that was never seen: a model's shape on a GPU's speeds.

A decoding step reads weights, keys and values once and multiplies; it takes as long as the slower
of the two, and a little that nothing hides. A prefill multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass

from april_rl.lab.simulator.engine_cost import EngineWork
from april_rl.lab.simulator.gpu_kinds import Rates

# Assumptions. Scheduling and sampling hide behind the GPU; a layer with experts has more kernels;
# an all-reduce over the GPUs of an engine takes this long at least.
_HOST_STEP_S, _HOST_SAMPLE_S = 2e-3, 8e-6
_EXPERT_LAYERS = 3.5
_REDUCTION_S = 12e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a model that decide its speed, in numbers and not in bytes."""

    num_parameters: float
    num_multiplied: float  # parameters that a token is multiplied with, of experts the chosen ones
    num_layers: int
    kv_numbers: float  # keys and values of a token
    attention_flops: float  # of the attention of one token to one other, in all layers
    expert_parameters: float = 0.0
    chosen_share: float = 1.0  # of the experts, by one token

    def num_read(self, batch: float) -> float:
        """Return the parameters that a step with this many tokens reads. Of the experts those that
        any token chose, if all are chosen equally often.
        """
        touched: float = 1 - (1 - self.chosen_share) ** batch
        return self.num_parameters - (1 - touched) * self.expert_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """Seconds of an engine's work, from its model and its GPUs.

    Left out: the attention of a prefill, a third more at 8,000 tokens; preemptions; keys and
    values that the GPUs of an engine hold twice, where there are more GPUs than heads.
    """

    shape: Shape
    rates: Rates
    num_gpus: int = 1  # of one engine (tensor parallelism)
    weight_bytes: int = 2  # of a number
    kv_bytes: int = 2  # of a number

    def seconds(self, work: EngineWork) -> float:
        """Return the seconds for this work."""
        engine_steps, slot_steps, context_token_steps, prefilled_tokens = work
        if not engine_steps:
            return 0.0
        shape, rates, batch = self.shape, self.rates, slot_steps / engine_steps
        num_bytes = (
            engine_steps * shape.num_read(batch) * self.weight_bytes
            + context_token_steps * shape.kv_numbers * self.kv_bytes
        )
        product_s = 2 * shape.num_multiplied / rates.prefill_flops_per_s / self.num_gpus
        attention_s = shape.attention_flops / rates.prefill_flops_per_s / self.num_gpus
        decode_s = max(
            num_bytes / rates.read_bytes_per_s / self.num_gpus,
            slot_steps * product_s + context_token_steps * attention_s,
        )
        layer_s = rates.layer_s * (_EXPERT_LAYERS if shape.expert_parameters else 1)
        layer_s += 2 * _REDUCTION_S if self.num_gpus > 1 else 0
        unhidden_s = rates.between_steps_s + shape.num_layers * layer_s
        host_s = engine_steps * _HOST_STEP_S + slot_steps * _HOST_SAMPLE_S
        return max(decode_s + engine_steps * unhidden_s, host_s) + prefilled_tokens * product_s
