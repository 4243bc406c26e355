"""Packed attention against one call of scaled dot-product attention per sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F  # noqa: N812
from bench_device import timed
from bench_models import ModelSize
from torch import Tensor, nn

from april_rl.learner.attention import Packing, packed_attention

# From query, key and value [1, heads, T, D] to the output [1, T, heads, D].
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention_lines(
    size: ModelSize, lengths: tuple[int, ...], *, device: torch.device, rounds: int
) -> list[tuple[str, str]]:
    """Return what was measured, as pairs of label and value, for one layer over a row of these
    sequences.
    """
    packing = Packing.of(lengths, device=device)
    scaling = size.head_dim**-0.5

    def packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found, _ = packed_attention(
            nn.Identity(), query, key, value, None, packing=packing, scaling=scaling
        )
        return found

    def one_by_one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        pieces = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
            for q, k, v in zip(
                *(x.split(list(lengths), dim=2) for x in (query, key, value)), strict=True
            )
        ]
        return torch.cat(pieces, dim=2).transpose(1, 2)

    inputs = _inputs(size, sum(lengths), device)
    exact = _outcome(one_by_one, [x.float() for x in inputs])
    ours, theirs = _outcome(packed, inputs), _outcome(one_by_one, inputs)
    ours_s, theirs_s = _times((packed, one_by_one), inputs, rounds=rounds)
    return [
        ("packed against SDPA, bfloat16", _errors(ours, theirs)),
        ("packed against SDPA in float32", _errors(ours, exact)),
        ("SDPA, bfloat16, against float32", _errors(theirs, exact)),
        ("time of packed, of SDPA", f"{1e3 * ours_s:.2f} ms, {1e3 * theirs_s:.2f} ms"),
    ]


def _inputs(size: ModelSize, num_tokens: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (size.num_heads, size.num_key_value_heads, size.num_key_value_heads)
    shapes = [(1, count, num_tokens, size.head_dim) for count in heads]
    return [torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in shapes]


def _outcome(attention: Attention, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the output and the gradients of query, key and value, in float32."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attention(*leaves)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(out, leaves, slope.to(out.device, out.dtype))
    return [x.detach().float() for x in (out, *gradients)]


def _errors(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> str:
    of_output = (found[0] - wanted[0]).abs().max().item()
    of_gradients = max(
        ((a - b).norm() / b.norm()).item() for a, b in zip(found[1:], wanted[1:], strict=True)
    )
    return f"output {of_output:.1e}, gradients {of_gradients:.1e}"


def _times(
    attentions: Sequence[Attention], inputs: Sequence[Tensor], *, rounds: int
) -> list[float]:
    """Return the median seconds of a forward and backward pass of each; they take turns."""
    seconds: list[list[float]] = [[] for _ in attentions]
    leaves = [x.detach().requires_grad_() for x in inputs]
    for _ in range(rounds):
        for attention, found in zip(attentions, seconds, strict=True):
            found.append(timed(partial(_pass, attention, leaves), leaves[0].device))
    return [median(found) for found in seconds]


def _pass(attention: Attention, leaves: Sequence[Tensor]) -> None:
    out = attention(*leaves)
    torch.autograd.grad(out, leaves, torch.ones_like(out))
