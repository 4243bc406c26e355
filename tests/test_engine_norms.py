"""The C norms against torch's own RMSNorm."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.slow  # imports vllm


def test_the_c_norms_are_rms_norms_also_of_views_and_with_a_residual():
    """Fails when rows are mixed up (a strided view, as q and k are) or the residual is left out."""
    from vllm import ir

    import april_rl.engine.vllm_engine  # noqa: F401 (sets vLLM up)
    from april_rl.engine.cpu_norms import PROVIDER, register_norms

    register_norms()
    register_norms()
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(6, 3, 64, generator=generator).to(torch.bfloat16)
    weight = torch.randn(32, generator=generator).to(torch.bfloat16)
    view = wide[..., :32]
    expected = torch.nn.functional.rms_norm(view.float(), (32,), weight.float(), 1e-6)
    found = ir.ops.rms_norm.impls[PROVIDER].impl_fn(view, weight, 1e-6)
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=1e-2)

    x, residual = view.reshape(-1, 32).clone(), view.flip(0).reshape(-1, 32).clone()
    total = x.float() + residual.float()
    expected = torch.nn.functional.rms_norm(total, (32,), weight.float(), 1e-6)
    found, kept = ir.ops.fused_add_rms_norm.impls[PROVIDER].impl_fn(x, residual, weight, 1e-6)
    torch.testing.assert_close(found.float(), expected, atol=4e-2, rtol=2e-2)
    torch.testing.assert_close(kept.float(), total, atol=2e-2, rtol=1e-2)
