"""Models on a GPU to simulate without a recorded run or a file of the model."""

from __future__ import annotations

from dataclasses import dataclass

from april_rl.lab.simulator.calibration import Calibration
from april_rl.lab.simulator.gpu_kinds import GPU_KINDS
from april_rl.lab.simulator.model_cost import ModelCost, Shape


@dataclass(frozen=True, slots=True)
class Preset:
    """A model in bfloat16 on a GPU."""

    shape: Shape
    gpu: str

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bytes of the keys and values of a token."""
        return 2 * round(self.shape.kv_numbers)

    def cost(self, measured: Calibration | None = None) -> ModelCost:
        """Return the cost of the engine, from the data sheet or a calibration of the GPU."""
        kind = GPU_KINDS[self.gpu]
        rates = measured.rates(kind) if measured else kind.rates()
        return ModelCost(shape=self.shape, rates=rates)


def _qwen3(num_parameters: float, num_multiplied: float) -> Shape:
    """Return a Qwen3 with 36 layers, 32 query heads and 8 KV heads of 128 (its config.json)."""
    return Shape(
        num_parameters=num_parameters,
        num_multiplied=num_multiplied,
        num_layers=36,
        kv_numbers=2 * 36 * 8 * 128,
        attention_flops=4 * 36 * 32 * 128,
    )


PRESETS: dict[str, Preset] = {
    "h100_qwen3_4b": Preset(_qwen3(4.02e9, 4.02e9), "h100"),
    "h100_qwen3_8b": Preset(_qwen3(8.19e9, 7.57e9), "h100"),
}
