"""Causal attention over a packed row: a token sees only its own sequence, and no T×T mask is built.

Legend: [T] tokens of the row, [Q] and [K] query and key heads, [D] head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.attention import activate_flash_attention_impl, register_flash_attention_impl
from torch.nn.attention._fa4 import register_flash_attention_fa4
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from april_rl.errors import RunError

NAME = "april_rl_packed"  # name in transformers, which builds no attention mask for it

_FLASH_ATTENTION_4 = (9, 10)  # compute capabilities that torch allows

MIN_WINDOW_BLOCK = 256  # least number of queries computed together when the window is short

# Argument of torch's checkpoint() with which a recomputed layer keeps what these kernels return.
# Attention with sinks or a soft cap is made of other operations, and is computed twice.
KEEP_OUTPUT = {
    "context_fn": partial(
        create_selective_checkpoint_contexts,
        [
            torch.ops.torch_attn._varlen_attn.default,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        ],
    )
}

# Options that models pass to their attention and that change nothing in packed attention.
_WITHOUT_EFFECT = frozenset(
    ("dropout", "use_cache", "position_ids", "output_attentions", "output_router_logits")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Positions of the sequences in a row; on the host, so that no kernel waits for them."""

    lengths: tuple[int, ...]  # tokens of each sequence; Σ lengths = T
    starts: Tensor  # int32 [sequences + 1], on the device of the row

    @classmethod
    def of(cls, lengths: tuple[int, ...], *, device: torch.device) -> Packing:
        """Return the packing of consecutive sequences with these lengths."""
        starts = F.pad(
            torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0)
        )
        return cls(lengths=lengths, starts=starts.to(device))


def register() -> None:
    ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)


def use_flash_attention_4() -> None:
    """Compute `varlen_attn` of this process with FlashAttention-4. Raise RunError without it."""
    module = "april_rl.training.engine.flash_attention_4"
    register_fn = partial(register_flash_attention_fa4, module_path=module)
    register_flash_attention_impl("FA4", register_fn=register_fn)
    capability = torch.cuda.get_device_capability()
    try:
        if capability[0] not in _FLASH_ATTENTION_4:
            raise RuntimeError(f"this GPU has compute capability {capability[0]}.{capability[1]}")
        activate_flash_attention_impl("FA4")
    except (ImportError, RuntimeError) as error:
        raise RunError(
            "learner.flash_attention_4=true needs a GPU of compute capability 9 or 10 (H100, H200, "
            f"B200) and vLLM's build for CUDA: {error}; set it to false"
        ) from error


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
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Return the attention output [1, T, Q, D] and no weights, as transformers expects.

    `query` [1, Q, T, D], `key` and `value` [1, K, T, D]. With `sliding_window` a token sees itself
    and the `sliding_window` - 1 tokens before it. `s_aux` [Q], the sinks, are scores of one more
    key, whose value is 0. `softcap` bounds the scores: softcap · tanh(score / softcap). Dropout is
    never applied: noisy log-probabilities give no usable ratio. Raises ValueError for an option
    that would be ignored silently.
    """
    assert attention_mask is None, "a packed row takes no mask"
    assert query.shape[0] == 1, "a packed row is a batch of one"
    wanted = (name for name, value in options.items() if value is not None)
    unsupported = sorted(name for name in wanted if name not in _WITHOUT_EFFECT)
    if unsupported:
        raise ValueError(
            f"model.path: the model's attention uses {unsupported}, which packed attention does "
            "not support; choose a model marked right in docs/models.md"
        )
    window = None
    if sliding_window is not None and sliding_window < max(packing.lengths):
        window = sliding_window
    scores = _Scores(scaling=scaling, window=window, sinks=s_aux, cap=softcap)
    if query.is_cuda and query.dtype is not torch.float32:
        return _varlen(query, key, value, packing, scores)[None], None
    return _one_by_one(query, key, value, packing, scores), None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scores:
    """How the products of queries and keys become attention."""

    scaling: float
    window: int | None  # None where it is longer than every sequence
    sinks: Tensor | None  # [Q]
    cap: float | None

    @property
    def is_plain(self) -> bool:
        """Return whether torch's own attention computes them."""
        return self.sinks is None and self.cap is None


def _one_by_one(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scores: _Scores
) -> Tensor:
    """Return attention [1, T, Q, D], computed in float32 with one call per sequence.

    The backward pass of the CPU kernel takes three times as long in bfloat16 as in float32.
    """
    pieces = [
        F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scores.scaling, enable_gqa=True
        )
        if scores.is_plain and (scores.window is None or scores.window >= q.shape[2])
        else _in_blocks(q, k, v, scores)
        for q, k, v in zip(
            *(torch.split(x.float(), list(packing.lengths), dim=2) for x in (query, key, value)),
            strict=True,
        )
    ]
    return torch.cat(pieces, dim=2).transpose(1, 2).to(query.dtype).contiguous()


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, scores: _Scores) -> Tensor:
    """Return attention [1, Q, L, D] of one sequence of L tokens, in blocks of queries.

    A block attends to its own keys and the window before it: with a window, time and memory grow
    with L, not L².
    """
    length = q.shape[2]
    window = length if scores.window is None else scores.window
    block = max(scores.window or 0, MIN_WINDOW_BLOCK)
    position = torch.arange(length, device=q.device)
    pieces = []
    for start in range(0, length, block):
        queries = slice(start, min(start + block, length))
        keys = slice(max(0, start - window + 1), queries.stop)
        distance = position[queries, None] - position[None, keys]
        is_seen = (distance >= 0) & (distance < window)
        pieces.append(_block(q[:, :, queries], k[:, :, keys], v[:, :, keys], is_seen, scores))
    return torch.cat(pieces, dim=2)


def _block(q: Tensor, k: Tensor, v: Tensor, is_seen: Tensor, scores: _Scores) -> Tensor:
    """Return attention of a block of queries to the keys that `is_seen` allows each of them."""
    if scores.is_plain:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=is_seen, scale=scores.scaling, enable_gqa=True
        )
    of_key = q.shape[1] // k.shape[1]  # query heads
    k, v = (x.repeat_interleave(of_key, dim=1) for x in (k, v))
    products = scores.scaling * q @ k.mT  # [1, Q, queries, keys]
    if scores.cap is not None:
        products = scores.cap * (products / scores.cap).tanh()
    products = products.masked_fill(~is_seen, -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.to(products)[:, None, None].expand(*products.shape[:3], 1)
        products = torch.cat([products, sinks], dim=-1)
    return products.softmax(-1)[..., : k.shape[2]] @ v


def _varlen(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scores: _Scores) -> Tensor:
    """Return attention [T, Q, D] from one FlashAttention call (CUDA and half precision only)."""
    assert scores.is_plain, "check_device refuses such a model"
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    longest = max(packing.lengths)
    # Number of earlier tokens that a token sees; -1 means all of them.
    before = -1 if scores.window is None else scores.window - 1
    out = varlen_attn(
        q, k, v, packing.starts, packing.starts, longest, longest,
        scale=scores.scaling, window_size=(before, 0), enable_gqa=True,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out
