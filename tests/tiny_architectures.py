"""Tiny random models of every architecture that transformers has a causal language model for.

Sizes are set by the names of a configuration's keys. Everything that a learner could overlook gets
a value that makes a difference: logit scales, soft caps, multipliers, and windows shorter than the
sequences.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCABULARY, WINDOW = 96, 4  # tokens
NUM_LAYERS = 4

# The first pattern that matches a whole key decides. Its value replaces a number; the last group of
# patterns also sets keys that are missing.
_SIZES: tuple[tuple[str, float], ...] = (
    (r"(unpadded_|decoder_)?vocab_size|vocab_size_per_layer_input", VOCABULARY),
    (r"(max|n)_positions?(_embeddings)?|max_target_positions|max_seq_len|n_ctx", 64),
    (r"(original_max_position_embeddings|context_length|model_max_length)", 64),
    (r"(swa_)?num_key_value_heads|num_kv_heads|num_global_key_value_heads|num_query_groups", 2),
    (r"(swa_|num_|(en|de)coder_|num_(en|de)coder_)?(attention_)?heads|n_heads?|index_n_heads", 4),
    (r"linear_num_(key|value)_heads|num_heads", 4),
    (r"swa_num_attention_heads", 4),
    (r"num_hidden_layers|n_layers?|num_layers|num_blocks", NUM_LAYERS),
    (r"(num_)?(en|de)coder_layers|num_layers_per_stack", NUM_LAYERS),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k", 2),
    (r"(num|n|moe_num)_(local_|routed_)?experts|zero_expert_num", 4),
    (r"n_group|topk_group|num_expert_group|n_shared_experts|(moe_)?num_shared_experts", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"hidden_size|n_embd|d_model|(input_|output_)?embedding_(size|dim)", 32),
    (r"word_embed_proj_dim|emb_dim|lru_width|backbone_hidden_size", 32),
    (r"hidden_size_per_layer_input|laurel_rank|gated_norm_rank|router_hidden_size|d_rel", 8),
    (r"(q|kv|o)_lora_rank|hc_lowrank|adapter_rank|index_head_dim", 16),
    (r"qk_(rope|nope)_head_dim|v_head_dim|qk_head_dim|rotary_dim", 8),
    (r"(swa_|linear_|linear_key_|linear_value_|mamba_|attention_)?head_dim|kv_channels", 8),
    (r"dim_head|d_head|attention_head_size|mamba_headdim|mamba_d_head", 8),
    (r"mamba_n_heads|mamba_num_heads", 8),
    (r"(mamba_d_|ssm_)?state(_size)?|mamba_chunk_size|chunk_size|mamba_dt_rank|rel_extent", 8),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size|ffn_size|intermediate_size_mlp)", 48),
    (r"n_inner|d_inner|dim_ff|dff|feed_forward_size|attention_hidden_size|mamba_d_ssm", 48),
    (
        r"attention_chunk_size|(local_)?attention(_window_size)?|window_size|keep_window_size",
        WINDOW,
    ),
    (r"num_kv_shared_layers|num_nextn_predict_layers|num_random_blocks", 0),
    (r"ngram_vocab_size_base|ple_embed_dim|split_ngram_parts", 32),
    (r"final_logit_softcapping|(output_)?logits?_soft_cap", 1.5),
    (r"logit_scale|logits_scaling|logits_mup_width_multiplier|lm_head_multiplier", 1.7),
    (r"(embedding|residual|key|attention_out|attention_in)_multiplier|embedding_scale", 1.3),
    (r"attention_multiplier", 0.3),
)
_PATTERNS = tuple((re.compile(pattern), value) for pattern, value in _SIZES)
_WINDOWS = re.compile(r"sliding_window(_size)?")  # replaced also where there is none by default
_NOISE = 0.3  # probability of every dropout, so that one that is still active shows
# Keys that single types need in addition or instead; None leaves a key unchanged.
_LFM2_LAYERS = ["conv", "full_attention"] * 2
# In these types four layers are off by float32's rounding, in transformers too.
_TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
_SPECIAL: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "logit_scale": 1.7,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {"layer_types": None},
    "diffllama": {"attention_dropout": None},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"intermediate_size": 48, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    "gemma4_text": _TWO_LAYERS,
    "gemma4_unified_text": _TWO_LAYERS,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "laguna": {"num_attention_heads_per_layer": [4] * NUM_LAYERS},
    "lfm2": {"layer_types": _LFM2_LAYERS},
    "lfm2_moe": {"layer_types": _LFM2_LAYERS},
    "longcat_flash": {"qk_head_dim": 16},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "minimax": {"layer_types": None},
    "minicpm3": {"dim_model_base": 16},
    "phimoe": {"sliding_window": None},
    "qwen2_moe": {"use_sliding_window": None, "layer_types": None},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "zaya": {"num_experts_per_tok": 1, "layer_types": None},
}


def tiny_config(model_type: str, **changes: object) -> PreTrainedConfig:
    default = AutoConfig.for_model(model_type)
    text = default.get_text_config()
    if text is default or "text_config" not in _own_keys(default):
        return type(default)(**_tiny_values(default) | changes)
    towers = {key: _tiny_values(of) for key, of in vars(default).items() if _is_tower(of, text)}
    return type(default)(text_config=_tiny_values(text) | changes, **towers)


def _is_tower(value: object, text: PreTrainedConfig) -> bool:
    """Return whether a value of a configuration belongs to a model other than the text model."""
    return isinstance(value, PreTrainedConfig) and value is not text


def tiny_model(config: PreTrainedConfig, *, seed: int = 0) -> PreTrainedModel:
    """Return a float32 model with eager attention, random in every tensor that checkpoints have.

    The standard deviation is large enough for a next-token distribution that is far from flat.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            for tensor in filter(torch.is_floating_point, model.state_dict().values()):
                _randomise(tensor)
    return model.eval()


def _randomise(tensor: torch.Tensor) -> None:
    if tensor.dim() >= 2:
        tensor.normal_(std=0.15)
    else:  # norms stay near 1 and biases near 0
        tensor.nan_to_num_().clamp_(-3, 3).add_(torch.randn_like(tensor), alpha=0.1)


def _tiny_values(default: PreTrainedConfig) -> dict[str, Any]:
    """Return the keys of a configuration that differ from `default`."""
    values = dict(_changed_values(default))
    if "kv_lora_rank" in values:  # latent attention has as many key heads as query heads
        values |= {"num_key_value_heads": 4, "qk_head_dim": 16}
    if {"sliding_window", "layer_types"} <= values.keys() | set(_own_keys(default)):
        values["layer_types"] = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
    values |= _SPECIAL.get(default.model_type, {})
    return {key: value for key, value in values.items() if value is not None}


def _changed_values(default: PreTrainedConfig) -> Iterator[tuple[str, Any]]:
    values = default.to_dict()
    for key in _own_keys(default):
        value = values.get(default.attribute_map.get(key, key))
        if _WINDOWS.fullmatch(key):
            yield key, WINDOW
        elif key == "use_sliding_window":
            yield key, True
        elif key.endswith("_token_id") and isinstance(value, int):
            yield key, min(value, 2)
        elif isinstance(value, float) and ("drop" in key or "jitter" in key):
            yield key, _NOISE
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield from ((key, size) for size in _size_of(key))


def _size_of(key: str) -> Iterator[float]:
    found = next((size for pattern, size in _PATTERNS if pattern.fullmatch(key)), None)
    if found is not None:
        yield found


def _own_keys(default: PreTrainedConfig) -> list[str]:
    return [field.name for field in fields(default)]
