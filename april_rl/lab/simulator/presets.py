"""Machines to simulate without a recorded run, from public figures of the H100.

A decoding step reads every weight once and every sample's keys and values; a prefill is limited by
arithmetic. Hardware: NVIDIA H100 SXM data sheet, 3.35 TB/s of HBM3 and 989 TFLOP/s dense bfloat16.
Models: config.json of Qwen3-4B and Qwen3-8B on Hugging Face, both with 36 layers and 8 KV heads of
128, 4.0e9 and 8.2e9 parameters. The efficiencies are assumptions, not measurements: kernels that
stream memory are said to reach three quarters of the peak, large matrix products half of it. With a
GPU at hand, a recorded run says better (`fit_cost`).
"""

from __future__ import annotations

from dataclasses import dataclass

from april_rl.lab.simulator.engine_cost import EngineCost

BYTES_PER_S = 3.35e12
FLOPS_PER_S = 989e12
MEMORY_EFFICIENCY = 0.75  # of the bandwidth, reading weights and keys and values
COMPUTE_EFFICIENCY = 0.5  # of the arithmetic, in the matrix products of a prefill
BETWEEN_STEPS_S = 2e-3  # seconds of a step for scheduling, sampling and launches
_BF16_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model on a GPU: the cost of its engine, and the memory of a token."""

    cost: EngineCost
    kv_bytes_per_token: int


def h100(*, num_parameters: float, num_layers: int, num_kv_heads: int, head_dim: int) -> Preset:
    """One H100 that serves a dense model in bfloat16.

    step_s = bytes of the weights ÷ bandwidth + what lies between two steps.
    sample_s = 2·parameters ÷ FLOP/s, counted in full although part of it hides behind the weights'
    way from memory: sampling and the host's work for each sample are not counted elsewhere.
    context_token_s = 2·layers·KV heads·head size·2 bytes ÷ bandwidth.
    prefill_token_s = 2·parameters ÷ FLOP/s; attention's own arithmetic, a third more at 8,000
    tokens, is left out.
    """
    bytes_per_s = BYTES_PER_S * MEMORY_EFFICIENCY
    token_s = 2 * num_parameters / (FLOPS_PER_S * COMPUTE_EFFICIENCY)
    kv_bytes = 2 * num_layers * num_kv_heads * head_dim * _BF16_BYTES
    return Preset(
        cost=EngineCost(
            step_s=num_parameters * _BF16_BYTES / bytes_per_s + BETWEEN_STEPS_S,
            sample_s=token_s,
            context_token_s=kv_bytes / bytes_per_s,
            prefill_token_s=token_s,
        ),
        kv_bytes_per_token=kv_bytes,
    )


PRESETS: dict[str, Preset] = {
    "h100_qwen3_4b": h100(num_parameters=4.0e9, num_layers=36, num_kv_heads=8, head_dim=128),
    "h100_qwen3_8b": h100(num_parameters=8.2e9, num_layers=36, num_kv_heads=8, head_dim=128),
}
