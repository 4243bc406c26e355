"""Causal attention over a packed row: no token sees another sequence, no mask of T² is ever built.

Legend: [T] tokens of the row, [Q] and [K] query and key heads, [D] head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "april_rl_packed"  # as transformers knows it; without a mask function of that name, no mask

MIN_WINDOW_BLOCK = 256  # queries that are computed together, at least, where a window is short

# What models say of their attention beside the tensors, and what changes nothing here.
_WITHOUT_EFFECT = frozenset(
    ("dropout", "use_cache", "position_ids", "output_attentions", "output_router_logits")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Where the sequences of a row are; known on the host, so that no kernel waits for it."""

    lengths: tuple[int, ...]  # tokens of each sequence; Σ lengths = T
    starts: Tensor  # int32 [sequences + 1], on the device of the row

    @classmethod
    def of(cls, lengths: tuple[int, ...], *, device: torch.device) -> Packing:
        """The packing of sequences that lie one behind the other."""
        starts = F.pad(
            torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0)
        )
        return cls(lengths=lengths, starts=starts.to(device))


def register() -> None:
    """Make transformers find `packed_attention` under `NAME`."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)


def packed_attention(
    module: nn.Module,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float,
    sliding_window: int | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention output [1, T, Q, D], and no weights; the interface is that of transformers.

    `query` [1, Q, T, D], `key` and `value` [1, K, T, D]. With `sliding_window` a token sees itself
    and the `sliding_window` - 1 tokens before it. Dropout is never applied: a log-probability with
    noise is no ratio. Raises ValueError for what would silently be left out.
    """
    assert attention_mask is None, "a packed row takes no mask"
    assert query.shape[0] == 1, "a packed row is a batch of one"
    wanted = (name for name, value in options.items() if value is not None)
    unsupported = sorted(name for name in wanted if name not in _WITHOUT_EFFECT)
    if unsupported:
        raise ValueError(f"model.path: the model's attention needs {unsupported}: not supported")
    window = None
    if sliding_window is not None and sliding_window < max(packing.lengths):
        window = sliding_window
    if query.is_cuda and query.dtype is not torch.float32:
        return _varlen(query, key, value, packing, scaling=scaling, window=window)[None], None
    return _one_by_one(query, key, value, packing, scaling=scaling, window=window), None


def _one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    *,
    scaling: float,
    window: int | None,
) -> Tensor:
    """[1, T, Q, D]: one call a sequence, in float32.

    The backward pass of the CPU kernel takes three times as long in bfloat16 as in float32.
    """
    pieces = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        if window is None or window >= q.shape[2]
        else _windowed(q, k, v, scaling=scaling, window=window)
        for q, k, v in zip(
            *(torch.split(x.float(), list(packing.lengths), dim=2) for x in (query, key, value)),
            strict=True,
        )
    ]
    return torch.cat(pieces, dim=2).transpose(1, 2).to(query.dtype).contiguous()


def _windowed(q: Tensor, k: Tensor, v: Tensor, *, scaling: float, window: int) -> Tensor:
    """[1, Q, L, D] of one sequence of L tokens, a block of queries after another.

    The keys of a block are its own and the window before it: time and memory grow with L, not L².
    """
    length, block = q.shape[2], max(window, MIN_WINDOW_BLOCK)
    position = torch.arange(length, device=q.device)
    pieces = []
    for start in range(0, length, block):
        queries = slice(start, min(start + block, length))
        keys = slice(max(0, start - window + 1), queries.stop)
        distance = position[queries, None] - position[None, keys]
        pieces.append(
            F.scaled_dot_product_attention(
                q[:, :, queries],
                k[:, :, keys],
                v[:, :, keys],
                attn_mask=(distance >= 0) & (distance < window),
                scale=scaling,
                enable_gqa=True,
            )
        )
    return torch.cat(pieces, dim=2)


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    *,
    scaling: float,
    window: int | None,
) -> Tensor:
    """[T, Q, D]: one FlashAttention call for the whole row; half precision on CUDA only."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    longest = max(packing.lengths)
    before = (
        -1 if window is None else window - 1
    )  # tokens before its own that a token sees; -1: all
    out = varlen_attn(
        q, k, v, packing.starts, packing.starts, longest, longest,
        scale=scaling, window_size=(before, 0), enable_gqa=True,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out
