"""Sizes computed from an empty model, against the model with its weights."""

import pytest
import torch
from fake_attention import allocate_attention
from psutil import Process
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from april_rl.config.lora import LoraConfig
from april_rl.start.planning.model import read_model
from april_rl.training.learner.model.model_sizes import model_sizes
from april_rl.training.learner.model.sizes import ModelSizes

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
EXPERTS = {"num_experts": 16, "moe_intermediate_size": 96}
MODELS = {
    "tied": (Qwen3Config, {"head_dim": 48, "tie_word_embeddings": True}),
    "untied": (LlamaConfig, {"head_dim": 48}),
    "qwen3_moe": (Qwen3MoeConfig, {**EXPERTS, "mlp_only_layers": [1], "decoder_sparse_step": 2}),
    "qwen2_moe": (Qwen2MoeConfig, {**EXPERTS, "shared_expert_intermediate_size": 512}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4}),
    "olmoe": (OlmoeConfig, {"num_experts": 8, "pad_token_id": 0, "eos_token_id": 1}),
}


def sizes_of(config: PreTrainedConfig, folder, *, rank: int | None = None) -> ModelSizes:
    config.save_pretrained(folder)
    lora = LoraConfig(rank=rank, target_modules=["q_proj"] if rank else None)
    return model_sizes(read_model(str(folder)), lora)


def test_an_empty_model_takes_no_memory(tmp_path):
    """Fails when its weights are allocated for a moment, with small objects between them: the heap
    grows by the model each time, and a process with a heap as large as the RAM cannot fork.
    """
    sizes = {**SIZES, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
    before = Process().memory_info().data
    sizes_of(Qwen3Config(**sizes), tmp_path)
    assert Process().memory_info().data - before < 2**29


@pytest.mark.parametrize("name", MODELS)
def test_parameters_count_the_model_with_every_expert(tmp_path, name):
    """Fails when tied embeddings count twice, or only the experts of one token count."""
    kind, own = MODELS[name]
    config = kind(**SIZES, **own)
    found = sizes_of(config, tmp_path)
    model = AutoModelForCausalLM.from_config(config)
    assert found.num_parameters == found.num_trained == sum(p.numel() for p in model.parameters())
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    assert (found.num_layers, found.layer_parameters) == (len(layers), max(layers))
    assert found.largest_tensor == max(p.numel() for p in model.parameters())
    outside = found.num_parameters - sum(layers) - found.embedding_unit
    assert found.root_parameters == outside
    assert found.embedding_unit == (0 if name == "tied" else 1000 * 128)


def test_adapter_parameters_are_counted_separately(tmp_path):
    """Rank 4 over the queries of six layers: [4, 128] and [4 · 48, 4] each."""
    found = sizes_of(Qwen3Config(**SIZES, head_dim=48, tie_word_embeddings=True), tmp_path, rank=4)
    assert found.has_adapters
    assert found.num_trained == 6 * 4 * (128 + 4 * 48)
    assert found.num_parameters > 100 * found.num_trained


def test_the_kv_cache_has_keys_and_values_of_every_layer(tmp_path):
    found = sizes_of(Qwen3Config(**SIZES, head_dim=48), tmp_path)
    assert found.kv_numbers == 6 * 2 * (2 * 48)
    assert found.num_heads == 4


@pytest.mark.parametrize("name", MODELS)
def test_activations_equal_what_autograd_keeps_for_a_real_model(tmp_path, name):
    """In bfloat16, with FlashAttention's allocations. Fails when a layer, or the recomputed one, is
    left out; where some layers have no experts, the largest layer counts.
    """
    kind, own = MODELS[name]
    config = kind(**SIZES, **own)
    found = sizes_of(config, tmp_path)
    kept = kept_bytes(config, is_checkpointed=False)
    assert found.activation_bytes == pytest.approx(kept, rel=0.02)
    inputs = kept_bytes(config, is_checkpointed=True)
    again = found.checkpointed_bytes + found.layer_bytes - inputs
    assert 0.9 * kept / 6 < again < (1.6 if name == "qwen3_moe" else 1.05) * kept / 6


def kept_bytes(config: PreTrainedConfig, *, is_checkpointed: bool, num_tokens: int = 512) -> float:
    """Return the bytes per token of all tensors that a forward pass keeps for the backward pass,
    without parameters.
    """
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    allocate_attention(model)
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train(is_checkpointed)
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.base_model(
            input_ids=torch.arange(num_tokens)[None],
            position_ids=torch.arange(num_tokens)[None],
            use_cache=False,
        )
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / num_tokens
