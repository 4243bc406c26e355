"""FlashAttention-4 of vLLM's build for CUDA, in the form that torch's registry expects.

Its forward function returns two more values than torch 2.13 unpacks (vLLM 0.32).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.vllm_flash_attn.cute import interface

_flash_attn_bwd = interface._flash_attn_bwd


def _flash_attn_fwd(*inputs: Tensor, **options: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    """Return the output and its normaliser, log Σ exp of the scores."""
    output, normaliser, *_ = interface._flash_attn_fwd(*inputs, **options)
    return output, normaliser
