"""Packed attention computes for every sequence what it would get on its own."""

import pytest
import torch
from learner_setup import CPU
from torch import nn

from april_rl.training.learner.model import attention
from april_rl.training.learner.model.attention import Packing, packed_attention

LENGTHS = (5, 1, 9, 3)
SIZE, HEADS, KEY_HEADS, HEAD_DIM, SCALING = sum(LENGTHS), 4, 2, 8, 0.3


def inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(1, heads, SIZE, HEAD_DIM).to(dtype).requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]


def attend_packed(qkv: list[torch.Tensor], **options: object) -> torch.Tensor:
    packing = Packing.of(LENGTHS, device=CPU)
    return packed_attention(nn.Identity(), *qkv, None, packing=packing, scaling=SCALING, **options)[
        0
    ]


def with_block_diagonal_mask(
    qkv: list[torch.Tensor],
    window: int = SIZE,
    *,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention in plain sums.

    A token sees itself and up to `window` - 1 earlier tokens of its own sequence: exp(score) ÷ (Σ
    exp(score) + exp(sink)), with the score bounded by `cap`.
    """
    query, key, value = qkv
    key, value = (x.repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (key, value))
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    seen = torch.ones(SIZE, SIZE).tril().triu(1 - window).bool()
    sees = (sequence[:, None] == sequence) & seen
    scores = query @ key.mT * SCALING
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    shares = scores.exp() * sees
    rest = 0.0 if sinks is None else sinks.exp()[:, None, None]
    return (shares / (shares.sum(-1, keepdim=True) + rest) @ value).transpose(1, 2)


CASES = [(window, False, None) for window in (1, 2, 4, 8, 9, None)]
CASES += [(4, *own) for own in ((True, None), (False, 0.7), (True, 0.7))]
CASES += [(None, *own) for own in ((True, None), (False, 0.7), (True, 0.7))]


@pytest.mark.parametrize(("window", "has_sinks", "cap"), CASES)
def test_packed_attention_equals_plain_sums(window, has_sinks, cap, monkeypatch):
    """Also in its gradients. Attention works in blocks of two queries or of the window, so most
    sequences span several blocks. Fails when a window is one token off, or ends at the border of a
    block.
    """
    monkeypatch.setattr(attention, "MIN_WINDOW_BLOCK", 2)
    qkv = inputs()
    sinks = torch.randn(HEADS, requires_grad=True) if has_sinks else None
    leaves = qkv if sinks is None else [*qkv, sinks]
    slope = torch.randn(1, SIZE, HEADS, HEAD_DIM)
    out = attend_packed(qkv, sliding_window=window, s_aux=sinks, softcap=cap)
    expected = with_block_diagonal_mask(qkv, window or SIZE, cap=cap, sinks=sinks)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    grads = torch.autograd.grad((out * slope).sum(), leaves)
    expected_grads = torch.autograd.grad((expected * slope).sum(), leaves)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, atol=1e-5, rtol=1e-5)


def test_bfloat16_inputs_give_bfloat16_outputs():
    assert attend_packed(inputs(torch.bfloat16)).dtype is torch.bfloat16


def test_starts_are_where_sequences_begin_and_end():
    assert Packing.of(LENGTHS, device=CPU).starts.tolist() == [0, 5, 6, 15, 18]


def test_an_argument_that_could_have_an_effect_is_refused():
    assert attend_packed(inputs(), dropout=0.0, use_cache=False, s_aux=None).shape[1] == SIZE
    with pytest.raises(ValueError, match="position_bias"):
        attend_packed(inputs(), position_bias=30.0)
