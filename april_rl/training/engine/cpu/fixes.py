"""Fixes for vLLM on CPU: weights that can be reloaded, and temperatures of guessed tokens.

Legend: [B] rows of an engine step, one per request. [N] tokens guessed for all requests.
"""

from __future__ import annotations

from functools import wraps

import torch
import vllm.model_executor.layers.utils as vllm_linear
import vllm.v1.sample.rejection_sampler as vllm_rejection
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

_set_up_experts = UnquantizedFusedMoEMethod._setup_kernel


def _plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:  # noqa: ARG001
    """Compute `layer` from its own weight, and keep that weight."""
    layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]


def keep_plain_weights() -> None:
    """Make every vLLM model built in this process from now on compute with its plain weights.

    vLLM packs linear weights into a second copy after loading. A reload packs the layers whose
    weights it loads. It loads none for a tied lm_head, which would compute with the old weights.
    """
    vllm_linear.dispatch_cpu_unquantized_gemm = _plain_linear


@wraps(_set_up_experts)
def _set_up_and_pack_experts(
    method: UnquantizedFusedMoEMethod, layer: RoutedExperts, w13: torch.Tensor, w2: torch.Tensor
) -> None:
    """Do vLLM's set-up, and pack again after a reload, which vLLM does not do."""
    is_reload = method.moe_kernel is not None
    _set_up_experts(method, layer=layer, w13=w13, w2=w2)
    if is_reload:
        assert method.moe_kernel is not None
        method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def keep_experts_packed() -> None:
    """Make every vLLM model in this process pack the experts' weights after each load.

    The kernel needs them padded and in its own order, and a reload loads them in a checkpoint's
    order. Without packing the kernel would misread them, or, if the width is padded, the reload
    would fail.
    """
    UnquantizedFusedMoEMethod._setup_kernel = _set_up_and_pack_experts  # type: ignore[assignment]


def _expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Return for each guessed token the value of its request, [N], from `x` [B]. `cu_num_tokens`
    [B] counts the tokens guessed for a request and all before it; `num_tokens` is its last
    value. `replace_from` becomes `replace_to`.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def fix_rejection_sampling() -> None:
    """Make every vLLM engine in this process expand temperatures with the function above.

    vLLM's CPU kernel takes integers: it reads a temperature of 0.7 as 0 and writes its result into
    an unused copy, so that logits of guessed tokens are divided by undefined values.
    """
    vllm_rejection.expand_batch_to_tokens = _expand_batch_to_tokens
