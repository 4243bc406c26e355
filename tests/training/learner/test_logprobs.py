"""Log-probabilities of the output layer against the whole logits in float32."""

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from april_rl.training.learner.model.logprobs import LogitShape, LogprobHead

NUM_TOKENS, HIDDEN, VOCABULARY, TEMPERATURE = 23, 16, 71, 0.7
PLAIN, SCALED, CAPPED = LogitShape(), LogitShape(scale=0.4), LogitShape(scale=1.7, cap=2.5)
ONE_BLOCK, UNEVEN_BLOCKS = 2**20, 4 * NUM_TOKENS * 20  # 71 = 3 · 20 + 11


def case(dtype: torch.dtype) -> tuple[torch.Tensor, nn.Parameter, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = nn.Parameter(torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype))
    labels = torch.randint(0, VOCABULARY, (NUM_TOKENS,), generator=generator)
    return hidden, weight, labels, torch.randn(NUM_TOKENS, generator=generator)


def from_all_logits(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, shape: LogitShape = PLAIN
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = shape.scale * (hidden.float() @ weight.float().T)
    if shape.cap is not None:
        logits = shape.cap * torch.tanh(logits / shape.cap)
    logprobs = (logits / TEMPERATURE).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, labels[:, None])[:, 0], entropy


@pytest.mark.parametrize("block_bytes", [ONE_BLOCK, UNEVEN_BLOCKS, 1])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 3e-5), (torch.bfloat16, 0.06)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("shape", [PLAIN, SCALED, CAPPED], ids=["plain", "scaled", "capped"])
def test_logprobs_entropy_and_gradients_equal_the_whole_softmax(
    block_bytes, dtype, tolerance, shape
):
    """Fails when a scale or a cap of the logits is forgotten in either pass, or in any block."""
    hidden, weight, labels, slope = case(dtype)
    expected, expected_entropy = from_all_logits(hidden, weight, labels, shape)
    expected_grads = torch.autograd.grad((expected * slope).sum(), (hidden, weight))
    head = LogprobHead(weight, temperature=TEMPERATURE, shape=shape, block_bytes=block_bytes)
    logprobs, entropy = head(hidden, labels)
    grads = torch.autograd.grad((logprobs * slope).sum(), (hidden, weight))
    close = {"atol": tolerance, "rtol": tolerance}
    torch.testing.assert_close(logprobs, expected, **close)
    torch.testing.assert_close(entropy, expected_entropy, **close)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert (grad - expected_grad).norm() <= tolerance * expected_grad.norm()


def test_entropy_has_no_gradient():
    hidden, weight, labels, _ = case(torch.float32)
    _, entropy = LogprobHead(weight, temperature=1.0)(hidden, labels)
    assert not entropy.requires_grad


def test_no_tokens_give_no_logprobs_and_a_zero_gradient():
    hidden, weight, labels, _ = case(torch.float32)
    logprobs, _ = LogprobHead(weight, temperature=1.0)(hidden[:0], labels[:0])
    [grad] = torch.autograd.grad(logprobs.sum(), weight)
    assert logprobs.shape == (0,)
    assert grad.count_nonzero() == 0


def test_logits_far_from_zero_do_not_overflow():
    hidden, weight, labels, _ = case(torch.float32)
    logprobs, entropy = LogprobHead(weight, temperature=1e-3, block_bytes=1)(hidden, labels)
    assert torch.isfinite(logprobs).all()
    assert (entropy >= 0).all()


def test_at_a_real_vocabulary_float32_is_within_1e_5_nats_of_float64():
    """The block sizes are the module's own. Fails when a sum is not rescaled with the running
    maximum.
    """
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(151_936, 64, generator=generator) * 3 / 8)
    hidden = torch.randn(64, 64, generator=generator)
    labels = torch.randint(0, len(weight), (64,), generator=generator)
    with torch.no_grad():
        exact = (hidden.double() @ weight.double().T / TEMPERATURE).log_softmax(-1)
        logprobs, entropy = LogprobHead(weight, temperature=TEMPERATURE)(hidden, labels)
    wanted = exact.gather(-1, labels[:, None])[:, 0]
    assert (logprobs.double() - wanted).abs().max() <= 1e-5
    assert (entropy.double() + (exact.exp() * exact).sum(-1)).abs().max() <= 1e-5


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the memory that `work` allocates at its peak, beyond what was allocated before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    results = profiler.profiler.kineto_results
    changes = [event for event in results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in changes))


def test_at_most_two_blocks_of_logits_exist_at_a_time():
    """Fails when a block outlives the products of the next one; gradients and [N] vectors are
    small.
    """
    num_tokens, block_bytes = 512, 2**20
    hidden = torch.randn(num_tokens, HIDDEN).bfloat16().requires_grad_()
    weight = nn.Parameter(torch.randn(4096, HIDDEN).bfloat16())
    labels = torch.randint(0, 4096, (num_tokens,))
    head = LogprobHead(weight, temperature=TEMPERATURE, block_bytes=block_bytes)
    outputs: list[torch.Tensor] = []
    assert peak_bytes(lambda: outputs.extend(head(hidden, labels))) <= 2.2 * block_bytes
    assert peak_bytes(lambda: outputs[0].sum().backward()) <= 2.2 * block_bytes


def test_a_block_has_a_multiple_of_128_rows_for_any_number_of_tokens():
    head = LogprobHead(nn.Parameter(torch.zeros(1, 1)), temperature=1.0)
    rows = [head._block_rows(torch.zeros(n, 1)) for n in (1, 999, 1001, 4099, 70_001)]
    assert [size % 128 for size in rows] == [0] * 5
