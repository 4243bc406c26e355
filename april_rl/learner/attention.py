"""Causal attention over a packed row: no token sees another sequence, no mask of T² is ever built.

Legend: [T] tokens of the row, [Q] and [K] query and key heads, [D] head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "april_rl_packed"  # as transformers knows it; without a mask function of that name, no mask

# What some architectures want of their attention and this one does not have.
_UNSUPPORTED = ("softcap", "s_aux")


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


def separates_samples(model: PreTrainedModel) -> bool:
    """Whether tokens of a row meet nowhere in `model` but in attention that can be replaced.

    Layers with a state of their own (linear attention, Mamba) carry it from sample to sample.
    """
    kinds = set(model.config.get_text_config().to_dict().get("layer_types") or ())
    return (
        bool(model._supports_attention_backend)
        and not model._is_stateful
        and all(kind.endswith("_attention") and kind != "linear_attention" for kind in kinds)
    )


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

    `query` [1, Q, T, D], `key` and `value` [1, K, T, D]. Dropout is never applied: a
    log-probability with noise is no ratio. Raises ValueError for what would silently be left out.
    """
    assert attention_mask is None, "a packed row takes no mask"
    assert query.shape[0] == 1, "a packed row is a batch of one"
    if sliding_window is not None and max(packing.lengths) > sliding_window:
        raise ValueError(
            f"model.path: the model attends to a window of {sliding_window} tokens and a sequence "
            f"has {max(packing.lengths)}; sliding-window attention is not supported in the learner"
        )
    unsupported = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if unsupported:
        raise ValueError(f"model.path: the model's attention needs {unsupported}: not supported")
    if query.is_cuda and query.dtype is not torch.float32:
        return _varlen(query, key, value, packing, scaling=scaling)[None], None
    return _one_by_one(query, key, value, packing, scaling=scaling), None


def _one_by_one(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, *, scaling: float
) -> Tensor:
    """[1, T, Q, D]: one call a sequence, in float32.

    The backward pass of the CPU kernel takes three times as long in bfloat16 as in float32.
    """
    pieces = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        for q, k, v in zip(
            *(torch.split(x.float(), list(packing.lengths), dim=2) for x in (query, key, value)),
            strict=True,
        )
    ]
    return torch.cat(pieces, dim=2).transpose(1, 2).to(query.dtype)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, *, scaling: float
) -> Tensor:
    """[T, Q, D]: one FlashAttention call for the whole row; half precision on CUDA only."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    longest = max(packing.lengths)
    out = varlen_attn(
        q, k, v, packing.starts, packing.starts, longest, longest,
        scale=scaling, window_size=(-1, 0), enable_gqa=True,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out
