"""Random models of given dimensions, written shard by shard so that they never are whole in
memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

_SHARD_BYTES = 2 * 2**30
_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The dimensions of a Qwen3 with a tied output layer."""

    vocabulary: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int

    @property
    def layer_parameters(self) -> int:
        """Return the number of weights in the matrices of one layer."""
        of_heads = (2 * self.num_heads + 2 * self.num_key_value_heads) * self.head_dim
        return self.hidden_size * (of_heads + 3 * self.intermediate_size)


def _narrow(vocabulary: int) -> ModelSize:
    return ModelSize(
        vocabulary=vocabulary,
        hidden_size=512,
        intermediate_size=1536,
        num_layers=4,
        num_heads=8,
        num_key_value_heads=4,
        head_dim=64,
    )


SIZES = {
    "tiny": ModelSize(  # that of the recipe tiny_cpu
        vocabulary=64,
        hidden_size=128,
        intermediate_size=512,
        num_layers=2,
        num_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    ),
    "small": _narrow(32_768),
    "small_wide": _narrow(151_936),
    "medium": ModelSize(  # 300 M parameters
        vocabulary=32_768,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=17,
        num_heads=16,
        num_key_value_heads=8,
        head_dim=128,
    ),
    "qwen3_0.6b": ModelSize(
        vocabulary=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_key_value_heads=8,
        head_dim=128,
    ),
    "qwen3_4b": ModelSize(
        vocabulary=151_936,
        hidden_size=2560,
        intermediate_size=9728,
        num_layers=36,
        num_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    ),
}


def write_random_model(folder: Path, size: ModelSize, *, seed: int = 0) -> None:
    """Write a bfloat16 Hugging Face folder with random weights: matrices with mean 0, norms 1."""
    config = Qwen3Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_key_value_heads,
        head_dim=size.head_dim,
        tie_word_embeddings=True,
        max_position_embeddings=40_960,
        architectures=["Qwen3ForCausalLM"],
    )
    with torch.device("meta"):
        shapes = {
            name: parameter.shape
            for name, parameter in AutoModelForCausalLM.from_config(config).named_parameters()
        }
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    weight_map = {}
    for number, shard in enumerate(_shards(shapes, seed), start=1):
        file = f"model-{number:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _shards(shapes: Mapping[str, torch.Size], seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield tensors by name, in shards below `_SHARD_BYTES` or of a single tensor."""
    generator = torch.Generator().manual_seed(seed)
    shard: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        tensor = torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) > 1:
            tensor.normal_(std=_STD, generator=generator)
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > _SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard
