"""Small random Qwen3 models for tests, with one token per character."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = ("<pad>", "<eos>", "<bos>", *map(chr, range(32, 127)))
PAD_ID, EOS_ID, BOS_ID = 0, 1, 2
# Settings of both types of model.
_SHAPE: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "bos_token_id": BOS_ID,
}


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of printable ASCII characters; anything else becomes <pad>."""
    words = {token: i for i, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern="", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )


def write_tiny_qwen3(
    path: Path | str,
    *,
    tied: bool = True,
    seed: int = 0,
    hidden_size: int = 64,
    num_layers: int = 2,
    initializer_range: float = 0.1,
    vocab_size: int = len(VOCABULARY),
) -> None:
    """Write a random bfloat16 Qwen3 and the tokenizer of 98 tokens into the folder `path`.

    The same arguments give the same weights. `tied`: whether lm_head is the embedding.
    `initializer_range` is the standard deviation of the weights: at 0.1 the next-token distribution
    is far from flat, so that a wrong weight shows in a log-probability.
    """
    config = Qwen3Config(
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        initializer_range=initializer_range,
        tie_word_embeddings=tied,
        **_SHAPE | {"vocab_size": vocab_size},
    )
    _write(Qwen3ForCausalLM, config, path, seed=seed)


def write_tiny_qwen3_moe(
    path: Path | str,
    *,
    tied: bool = False,
    seed: int = 0,
    num_experts: int = 6,
    initializer_range: float = 0.1,
) -> None:
    """Write a random bfloat16 Qwen3-MoE and its tokenizer into the folder `path`.

    It has three layers: the middle one is dense, and in the others each token goes to two of
    `num_experts`. On disk each expert has its own tensors, as in published checkpoints.
    """
    config = Qwen3MoeConfig(
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=48,
        num_experts=num_experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        num_hidden_layers=3,
        initializer_range=initializer_range,
        tie_word_embeddings=tied,
        **_SHAPE,
    )
    _write(Qwen3MoeForCausalLM, config, path, seed=seed)


def _write(
    kind: type[PreTrainedModel], config: PreTrainedConfig, path: Path | str, *, seed: int
) -> None:
    """Write a random model of `config` and the tokenizer without changing the global seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
    model.to(torch.bfloat16).save_pretrained(path)
    character_tokenizer().save_pretrained(path)
