"""A model of the same architecture and vocabulary with layers small enough for a laptop."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils.logging import disable_progress_bar

_HIDDEN, _HEADS, _HEAD_DIM, _LAYERS, _EXPERTS = 128, 4, 32, 2, 4


def write_tiny_model(folder: Path, *, config_path: str, num_tokens: int = 0) -> int:
    """Write a random bfloat16 model like that of `config_path` into `folder`; the vocabulary keeps
    its size, or grows to the `num_tokens` of a tokenizer that belongs to another model. Returns the
    number of its parameters.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call]
    config = shrunk(AutoConfig.from_pretrained(config_path))
    text = config.get_text_config()
    text.vocab_size = max(text.vocab_size, num_tokens)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def shrunk(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the text model with few, narrow layers, some of each kind;
    everything other than sizes stays as it is.
    """
    text = config.get_text_config()
    sizes = text.to_dict()
    grouped = (sizes.get("num_key_value_heads") or sizes["num_attention_heads"]) < sizes[
        "num_attention_heads"
    ]
    changes: dict[str, object] = {
        "hidden_size": _HIDDEN,
        "intermediate_size": 2 * _HIDDEN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS // 2 if grouped else _HEADS,
        "head_dim": _HEAD_DIM,
        "moe_intermediate_size": _HIDDEN,
        "num_experts": _EXPERTS,
        "num_local_experts": _EXPERTS,
        "num_experts_per_tok": 2,
        "max_window_layers": _LAYERS,
        "linear_num_key_heads": _HEADS // 2,
        "linear_num_value_heads": _HEADS,
    }
    for key, value in changes.items():
        if sizes.get(key) is not None:
            setattr(text, key, value)
    if sizes.get("layer_types"):
        kinds = list(dict.fromkeys(sizes["layer_types"]))  # one layer of each
        text.layer_types = (kinds * _LAYERS)[: max(_LAYERS, len(kinds))]
        text.num_hidden_layers = len(text.layer_types)
    return text
