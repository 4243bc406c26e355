"""Bytes that an update moves on a GPU, with and without compiled functions, for two models."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from memory_traffic import MemoryTraffic
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from april_rl.training.learner.model import logprobs
from april_rl.training.learner.model.fused import fuse
from april_rl.training.learner.model.logprobs import LogprobHead

NUM_TOKENS = 16_384  # tokens of a row
HEADS = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
MODELS = {
    "Qwen3-0.6B": (28, {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16}),
    "Qwen3-4B": (36, {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32}),
}


class FlashAttention(torch.autograd.Function):
    """An attention that reads its inputs once and writes its outputs once, as a kernel does."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        return torch.empty_like(query).transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, ...]:
        return tuple(each.clone() for each in ctx.saved_tensors)


def attention(
    _module: object, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
) -> tuple[Tensor, None]:
    return FlashAttention.apply(query, key, value), None


def update_bytes(name: str, *, is_fused: bool, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Return the GB that a forward and backward pass over a row moves in bfloat16, in all layers
    and in the output layer.
    """
    num_layers, widths = MODELS[name]
    ALL_ATTENTION_FUNCTIONS.register("counted", attention)
    config = Qwen3Config(num_hidden_layers=1, **widths, **HEADS)
    traffic = MemoryTraffic()
    monkeypatch.setattr(logprobs, "compile_function", traffic.compile_function)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="counted"
        )
        layer, head = model.model.layers[0], LogprobHead(model.lm_head.weight, temperature=1.0)
        if is_fused:
            fuse(model, compiled=traffic.compile_function)
            head.fuse()
        hidden = torch.empty(
            1, NUM_TOKENS, config.hidden_size, dtype=torch.bfloat16, requires_grad=True
        )
        labels = torch.empty(NUM_TOKENS, dtype=torch.int64)
        angles = torch.empty(1, NUM_TOKENS, config.head_dim, dtype=torch.bfloat16)

        def of_layer() -> None:
            layer(hidden, position_embeddings=(angles, angles)).sum().backward()

        def of_head() -> None:
            head(hidden[0], labels)[0].sum().backward()

        one_layer, output_layer = (counted(traffic, each) for each in (of_layer, of_head))
    return {"layers": num_layers * one_layer / 1e9, "output layer": output_layer / 1e9}


def counted(traffic: MemoryTraffic, work: Callable[[], None]) -> int:
    work()  # this call compiles
    traffic.num_bytes = 0
    with traffic:
        work()
    return traffic.num_bytes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler reads this
@pytest.mark.parametrize(
    ("name", "most"),
    [("Qwen3-0.6B", 0.3), pytest.param("Qwen3-4B", 0.38, marks=pytest.mark.soak)],
)
def test_compiled_functions_save_most_bytes_of_an_update(name, most, monkeypatch):
    """Fails when norms, MLPs, rotary embeddings or the output layer are no longer compiled."""
    plain, compiled = (
        update_bytes(name, is_fused=each, monkeypatch=monkeypatch) for each in (False, True)
    )
    print(plain, compiled)
    assert sum(compiled.values()) <= most * sum(plain.values())
