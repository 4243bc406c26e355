"""Machines to simulate without a recorded run, from public figures of the H100.

A decoding step reads every weight once and every sample's keys and values; a prefill is limited
by arithmetic. Hardware: NVIDIA H100 SXM data sheet, 3.35 TB/s of HBM3 and 989 TFLOP/s dense
bfloat16. Models: config.json of Qwen3-4B and Qwen3-8B on Hugging Face, both with 36 layers and 8
KV heads of 128, 4.0e9 and 8.2e9 parameters. The efficiencies are assumptions, not measurements:
kernels that stream memory are assumed to reach three quarters of the peak, large matrix products
half of it. A GPU's calibration.json (`calibration.py`) or a recorded run (`fit_cost`) is more
precise.
"""

from __future__ import annotations

from dataclasses import dataclass

from april_rl.lab.simulator.engine_cost import EngineCost

_BF16_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Speeds of a GPU with an engine."""

    bytes_per_s: float  # reading weights, keys and values
    flops_per_s: float  # FLOPs per second in the matrix products of a prefill
    between_steps_s: float  # seconds of a step for scheduling, sampling and launches


H100 = Rates(bytes_per_s=0.75 * 3.35e12, flops_per_s=0.5 * 989e12, between_steps_s=2e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A dense model in bfloat16 on a GPU."""

    num_parameters: float
    kv_bytes_per_token: int
    rates: Rates = H100

    @property
    def cost(self) -> EngineCost:
        """Return the cost of the engine.

        step_s = bytes of the weights ÷ bandwidth + the time between two steps. sample_s =
        2·parameters ÷ FLOP/s, counted in full although part of it hides behind the weights' way
        from memory: sampling and the host's work for each sample are not counted elsewhere.
        context_token_s = bytes of a token's keys and values ÷ bandwidth. prefill_token_s =
        2·parameters ÷ FLOP/s; attention's own arithmetic, a third more at 8,000 tokens, is left
        out.
        """
        rates = self.rates
        token_s = 2 * self.num_parameters / rates.flops_per_s
        weight_s = self.num_parameters * _BF16_BYTES / rates.bytes_per_s
        return EngineCost(
            step_s=weight_s + rates.between_steps_s,
            sample_s=token_s,
            context_token_s=self.kv_bytes_per_token / rates.bytes_per_s,
            prefill_token_s=token_s,
        )


_KV_BYTES = 2 * 36 * 8 * 128 * _BF16_BYTES  # for both models
PRESETS: dict[str, Preset] = {
    "h100_qwen3_4b": Preset(num_parameters=4.0e9, kv_bytes_per_token=_KV_BYTES),
    "h100_qwen3_8b": Preset(num_parameters=8.2e9, kv_bytes_per_token=_KV_BYTES),
}
