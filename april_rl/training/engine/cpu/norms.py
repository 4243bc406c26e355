"""vLLM's C kernels for RMSNorm on CPU, which vLLM contains but does not use there.

Its default on CPU is a chain of torch operations, which takes a quarter of the time of a prefill.
Both compute in float32; the fused kernel rounds the sum before it normalises it.
"""

# ruff: noqa: ARG001, ARG005 - vLLM compares these signatures with its own

from __future__ import annotations

import torch
from torch import Tensor
from vllm import ir

PROVIDER = "april_cpu"
PRIORITY = {"rms_norm": [PROVIDER], "fused_add_rms_norm": [PROVIDER]}


def _is_plain(x: Tensor, weight: Tensor | None, variance_size: int | None) -> bool:
    return variance_size is None and weight is not None and weight.dtype == x.dtype


def register_norms() -> None:
    """Register the kernels with vLLM as PROVIDER; do nothing if that is done already."""
    if PROVIDER in ir.ops.rms_norm.impls:
        return

    @ir.ops.rms_norm.register_impl(
        PROVIDER,
        supports_args=lambda x, weight, epsilon, variance_size=None: _is_plain(
            x, weight, variance_size
        ),
        supported=True,
    )
    def _rms_norm(
        x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        torch.ops._C.rms_norm(out, rows.contiguous(), weight, epsilon)
        return out.reshape(x.shape)

    @ir.ops.fused_add_rms_norm.register_impl(
        PROVIDER,
        supports_args=lambda x, x_residual, weight, epsilon, variance_size=None: _is_plain(
            x, weight, variance_size
        ),
        supported=True,
        inplace=True,
    )
    def _fused_add_rms_norm(
        x: Tensor,
        x_residual: Tensor,
        weight: Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual
