"""Compare the C norms with RMSNorm by its definition, in float32."""

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine]
EPSILON = 1e-6
# Relative error of one rounding to bfloat16: to the nearest value, or towards zero, as vLLM's
# kernels do on CPUs without bfloat16 instructions, with AVX-512 or not.
HALF_ULP = 2.0**-8
ROUNDING = {
    torch.float32: 1e-5,
    torch.bfloat16: HALF_ULP if torch.cpu._is_avx512_bf16_supported() else 2 * HALF_ULP,
}


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute equation 4 of Zhang and Sennrich 2019 in float32 [..., D]."""
    x = x.float()
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight.float()


@pytest.fixture(scope="module")
def ops():
    """Return vLLM's norms with the priority that an engine on a CPU sets."""
    from vllm import ir

    import april_rl.training.engine.vllm_engine  # noqa: F401 (sets vLLM up)
    from april_rl.training.engine.cpu.norms import PRIORITY, register_norms

    register_norms()
    register_norms()
    with (
        ir.ops.rms_norm.set_priority(PRIORITY["rms_norm"]),
        ir.ops.fused_add_rms_norm.set_priority(PRIORITY["fused_add_rms_norm"]),
    ):
        yield ir.ops


@pytest.fixture(params=ROUNDING, ids=str)
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture
def view(dtype) -> torch.Tensor:
    """Return rows [6, 3, 32] with gaps between them, as in q and k; some are so small that epsilon
    matters.
    """
    rows = torch.randn(6, 3, 64, generator=torch.Generator().manual_seed(0))
    rows[0] *= EPSILON**0.5
    return rows.to(dtype)[..., :32]


@pytest.fixture
def weight(dtype) -> torch.Tensor:
    return torch.randn(32, generator=torch.Generator().manual_seed(1)).to(dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor, *, num_roundings: int) -> None:
    slack = 1.01  # float32 is not exact either
    rtol = slack * num_roundings * ROUNDING[found.dtype]
    torch.testing.assert_close(found.float(), expected, rtol=rtol, atol=1e-6)


def test_the_c_norm_is_rms_norm_rounded_once_even_for_a_view(ops, view, weight):
    """Fails when a view's rows are treated as contiguous, or with the wrong epsilon."""
    found = ops.rms_norm(view, weight, EPSILON)
    assert found.shape == view.shape
    assert_close(found, rms_norm(view, weight), num_roundings=1)


def test_the_fused_norm_adds_the_residual_and_keeps_the_sum(ops, view, weight):
    """Fails when the residual is left out. The sum is rounded before it is normalised."""
    from april_rl.training.engine.cpu.norms import PROVIDER

    x, residual = view.reshape(-1, 32).clone(), view.flip(0).reshape(-1, 32).clone()
    total = x.float() + residual.float()
    fused = ops.fused_add_rms_norm.impls[PROVIDER].impl_fn
    found, kept = fused(x, residual, weight, EPSILON)
    assert_close(kept, total, num_roundings=1)
    assert_close(found, rms_norm(total, weight), num_roundings=2)


def test_vllm_uses_the_c_norms_where_they_apply_and_its_own_elsewhere(ops, view, weight):
    """Fails when they are also used for a norm without a weight, of a part of the row, or of mixed
    types.
    """
    from april_rl.training.engine.cpu.norms import PROVIDER

    def provider(op, *tensors, **options):
        return op.dispatch(*tensors, EPSILON, **options).provider

    assert provider(ops.rms_norm, view, weight) == PROVIDER
    assert provider(ops.fused_add_rms_norm, view, view, weight) == PROVIDER
    assert provider(ops.rms_norm, view, None) == "native"
    assert provider(ops.rms_norm, view, weight.double()) == "native"
    assert provider(ops.fused_add_rms_norm, view, view, weight, variance_size=16) == "native"
