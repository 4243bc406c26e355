"""What a model does beside its matrices: noise in training mode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_setup import Example, group_of_one, pack
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    OPTConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Starcoder2Config,
)

from april_rl.learner.architecture import silence
from april_rl.learner.mesh import build_mesh
from april_rl.learner.policy import Policy, build_policy
from april_rl.learner.row import PackedRow

CPU = torch.device("cpu")
SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
NOISY = [
    Starcoder2Config(
        **SIZES,
        num_key_value_heads=2,
        intermediate_size=48,
        residual_dropout=0.1,
        embedding_dropout=0.1,
        attention_dropout=0.1,
    ),
    OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32, dropout=0.1, layerdrop=0.1),
    PhimoeConfig(
        **SIZES,
        num_key_value_heads=2,
        intermediate_size=48,
        num_local_experts=4,
        router_jitter_noise=0.2,
        input_jitter_noise=0.2,
    ),
]


@pytest.fixture(scope="module", autouse=True)
def _group():
    with group_of_one():
        yield


def build(config: PreTrainedConfig, folder: Path, *, activation_checkpointing: bool) -> Policy:
    """A random model of `config` as the learner builds it from a folder."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return build_policy(
        folder,
        mesh=build_mesh("cpu", shard_size=0),
        device=CPU,
        compute_dtype=torch.float32,
        activation_checkpointing=activation_checkpointing,
        temperature=1.0,
    )


def example(length: int) -> Example:
    """A prompt of two tokens and a response, `length` tokens together."""
    token_ids = tuple(3 + (7 * i * i) % 90 for i in range(length))
    return Example(
        token_ids=token_ids,
        num_prompt=2,
        behaviour_logprobs=np.zeros(length - 2, np.float32),
        advantage=0.0,
        age=0,
    )


def learner_logprobs(policy: Policy, examples: Sequence[Example]) -> Tensor:
    """Of all responses, one behind the other, from one packed row."""
    logprobs: Tensor = policy(PackedRow.of(pack(examples, total=1), device=CPU))[0]
    return logprobs.detach()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # OPT's layers return a view
@pytest.mark.parametrize("config", NOISY, ids=lambda config: config.model_type)
def test_activation_checkpointing_brings_no_noise(config, tmp_path):
    """Two passes are equal to the last bit. They were 1 to 3 nats apart with dropout left on."""
    policy = build(config, tmp_path / "model", activation_checkpointing=True)
    assert policy.training
    first, second = (learner_logprobs(policy, [example(37)]) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_noise_of_a_nested_text_configuration_is_silenced_too():
    """Other settings stay: switches with such a name, and what is not set."""
    config = Gemma3Config()
    config.text_config.attention_dropout = 0.1
    config.vision_config.attention_dropout = 0.2
    config.text_config.norm_topk_before_dropping = True
    config.text_config.classifier_dropout = None
    silence(config)
    assert config.text_config.attention_dropout == 0
    assert config.vision_config.attention_dropout == 0
    assert config.text_config.norm_topk_before_dropping is True
    assert config.text_config.classifier_dropout is None
