"""Packed attention: what every sequence would get alone."""

import pytest
import torch
from accelerate import init_empty_weights
from learner_setup import group_of_one
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from april_rl.learner.attention import Packing, packed_attention, separates_samples
from april_rl.learner.checkpoint import CheckpointError
from april_rl.learner.mesh import build_mesh
from april_rl.learner.policy import build_policy

LENGTHS = (5, 1, 9, 3)
SIZE, HEADS, KEY_HEADS, HEAD_DIM, SCALING = sum(LENGTHS), 4, 2, 8, 0.3
CPU = torch.device("cpu")


def inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(1, heads, SIZE, HEAD_DIM).to(dtype).requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]


def packed(qkv: list[torch.Tensor], **options: object) -> torch.Tensor:
    packing = Packing.of(LENGTHS, device=CPU)
    return packed_attention(nn.Identity(), *qkv, None, packing=packing, scaling=SCALING, **options)[
        0
    ]


def with_block_diagonal_mask(qkv: list[torch.Tensor]) -> torch.Tensor:
    query, key, value = qkv
    key, value = (x.repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (key, value))
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    sees = (sequence[:, None] == sequence) & torch.ones(SIZE, SIZE).tril().bool()
    scores = (query @ key.mT * SCALING).masked_fill(~sees, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def test_values_and_gradients_are_those_of_a_block_diagonal_mask():
    qkv = inputs()
    slope = torch.randn(1, SIZE, HEADS, HEAD_DIM)
    out, expected = packed(qkv), with_block_diagonal_mask(qkv)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    grads = torch.autograd.grad((out * slope).sum(), qkv)
    expected_grads = torch.autograd.grad((expected * slope).sum(), qkv)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, atol=1e-5, rtol=1e-5)


def test_bfloat16_comes_back_as_bfloat16():
    assert packed(inputs(torch.bfloat16)).dtype is torch.bfloat16


def test_starts_are_where_sequences_begin_and_end():
    assert Packing.of(LENGTHS, device=CPU).starts.tolist() == [0, 5, 6, 15, 18]


def test_a_window_shorter_than_a_sequence_is_refused():
    assert packed(inputs(), sliding_window=9).shape[1] == SIZE
    with pytest.raises(ValueError, match="window of 8 tokens"):
        packed(inputs(), sliding_window=8)


def test_attention_with_softcap_is_refused():
    with pytest.raises(ValueError, match="softcap"):
        packed(inputs(), softcap=30.0)


@pytest.mark.parametrize(
    ("model_type", "does"),
    [
        ("qwen3", True),
        ("qwen3_moe", True),
        ("gemma3_text", True),
        ("qwen3_next", False),
        ("mamba2", False),
        ("minimax", False),
        ("lfm2", False),
    ],
)
def test_models_that_mix_tokens_outside_attention_are_recognised(model_type, does):
    """Fails when only the flag of stateful models is asked, or only the kinds of layers."""
    config = AutoConfig.for_model(model_type, num_hidden_layers=4)
    if model_type == "lfm2":
        config.layer_types = ["conv", "full_attention"] * 2
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config)
    assert separates_samples(model) is does


def test_a_model_with_linear_attention_is_refused_by_name(tmp_path):
    AutoConfig.for_model("qwen3_next", num_hidden_layers=2).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="model_type qwen3_next mixes tokens"), group_of_one():
        build_policy(
            tmp_path,
            mesh=build_mesh("cpu", shard_size=0),
            device=CPU,
            compute_dtype=torch.float32,
            activation_checkpointing=False,
            temperature=1.0,
        )
