"""Check an export of adapters."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


def check_merged(exported: Path, start: Mapping[str, Tensor], *, scaling: float) -> None:
    """Check that the folder's weights are `start` plus its trained adapters, for every matrix of
    two layers.
    """
    adapters = load_file(exported / "adapter" / "adapter_model.safetensors")
    merged = load_file(exported / "model.safetensors")
    names = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in adapters}
    assert len(adapters) == 2 * len(names) == 2 * 2 * 7  # two layers with seven matrices each
    for name, weight in merged.items():
        expected = start[name].float()
        layer = name.removesuffix(".weight")
        if layer in names:
            a, b = (adapters[f"base_model.model.{layer}.lora_{part}.weight"] for part in "AB")
            assert b.abs().max() > 0
            expected = expected + scaling * b @ a
        torch.testing.assert_close(weight.float(), expected, atol=1e-4, rtol=2e-2)
