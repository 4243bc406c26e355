"""An attention that allocates the same tensors as FlashAttention and computes nothing."""

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_NAME = "april_rl_allocating"


def allocate_attention(model: PreTrainedModel) -> None:
    """Make the model call this attention."""
    ALL_ATTENTION_FUNCTIONS.register(_NAME, _attention)
    model.set_attn_implementation(_NAME)


def _attention(_, query, key, value, *__, **___):
    return _Flash.apply(query, key, value), None


class _Flash(torch.autograd.Function):
    """Function that allocates what FlashAttention allocates in both passes."""

    @staticmethod
    def forward(ctx, query, key, value):
        batch, heads, tokens, _ = query.shape
        out = query.new_empty(batch, tokens, heads, value.shape[3])
        ctx.save_for_backward(query, key, value, out, query.new_empty(batch, heads, tokens))
        return out

    @staticmethod
    def backward(ctx, _):
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
