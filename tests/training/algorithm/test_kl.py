"""KL estimators and entropy terms: values, and what their gradients do on average.

Averages are exact, over every token of a vocabulary of seven, not sampled.
"""

import math

import pytest
import torch
from torch import Tensor

from april_rl.training.algorithm.kl import k1_to_go, k2, k3, sampled_negative_entropy
from april_rl.training.algorithm.responses import Responses

LOGITS = torch.tensor([0.3, -1.0, 2.0, 0.0, 0.7, -0.4, 1.1], dtype=torch.float64)
REFERENCE = torch.tensor([1.0, 0.2, -0.5, 0.4, 0.0, 0.9, -1.3], dtype=torch.float64).log_softmax(0)


def mean_slope(term, *fixed: Tensor) -> Tensor:
    """Return E over the policy's tokens of ∇ term(log π(token), …) by logits, which is what
    training applies.
    """
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    [gradient] = torch.autograd.grad(
        (logprobs.detach().exp() * term(logprobs, *fixed)).sum(), logits
    )
    return gradient


def slope_of(quantity) -> Tensor:
    logits = LOGITS.clone().requires_grad_()
    [gradient] = torch.autograd.grad(quantity(logits.log_softmax(0)), logits)
    return gradient


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum()


def test_the_estimators_equal_values_computed_by_hand():
    logprobs, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert k2(logprobs, reference).tolist() == [0.125, 0.5]
    expected = [math.exp(-0.5) - 1 + 0.5, math.e - 2]
    assert k3(logprobs, reference).tolist() == pytest.approx(expected)


def test_k1_to_go_sums_over_a_token_and_those_after_it_in_its_response():
    logprobs = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    found = k1_to_go(logprobs, torch.ones(5), Responses.of([3, 0, 2]))
    assert found.tolist() == [3.0, 3.0, 2.0, 7.0, 4.0]


def test_k1_to_go_has_the_gradient_of_the_divergence_of_whole_responses():
    """Over all pairs of tokens, where the distribution of the second depends on the first. Fails
    when a token's sum includes earlier tokens, or only its own part.
    """
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(n, 3, dtype=torch.float64, generator=generator) for n in (1, 3))
    others = [torch.randn_like(t).log_softmax(1) for t in (first, second)]

    def logprobs(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of both tokens of each of nine responses [9]."""
        a, b = first.log_softmax(1), second.log_softmax(1)
        return a[0].repeat_interleave(3), b.flatten()

    leaves = [first.clone().requires_grad_(), second.clone().requires_grad_()]
    ours, theirs = logprobs(*leaves), logprobs(*others)
    probabilities = (ours[0] + ours[1]).exp()
    divergence = (probabilities * (sum(ours) - sum(theirs))).sum()
    expected = torch.autograd.grad(divergence, leaves, retain_graph=True)
    tokens = torch.stack(ours, dim=1).flatten()
    to_go = k1_to_go(tokens, torch.stack(theirs, dim=1).flatten(), Responses.of([2] * 9))
    weights = probabilities.detach().repeat_interleave(2)
    found = torch.autograd.grad((weights * to_go * tokens).sum(), leaves)
    torch.testing.assert_close(found, expected)


def test_k3_averages_to_the_divergence_and_k2_and_k3_are_never_negative():
    """Planted bug: k3 of the inverse ratio, which has another mean."""
    policy = LOGITS.log_softmax(0)
    mean = (policy.exp() * k3(policy, REFERENCE)).sum()
    torch.testing.assert_close(mean, kl(policy, REFERENCE))
    assert (k2(policy, REFERENCE) > 0).all()
    assert (k3(policy, REFERENCE) > 0).all()


def test_k3_is_exact_where_policy_and_reference_almost_agree():
    """In float32, it is half the square of 1e-4 and not rounding noise. Planted bug: exp(x) - 1."""
    value = k3(torch.tensor([-1.0]), torch.tensor([-1.0001])).item()
    log_ratio = float(torch.tensor(-1.0001) - torch.tensor(-1.0))
    assert value == pytest.approx(log_ratio**2 / 2, rel=1e-2)


def test_the_gradient_of_k2_equals_the_gradient_of_the_divergence():
    """Planted bug: k2 without its half."""
    expected = slope_of(lambda logprobs: kl(logprobs, REFERENCE))
    torch.testing.assert_close(mean_slope(k2, REFERENCE), expected)


def test_the_gradient_of_k3_equals_the_gradient_of_the_other_divergence():
    expected = slope_of(lambda logprobs: kl(REFERENCE, logprobs))
    torch.testing.assert_close(mean_slope(k3, REFERENCE), expected)
    forward = slope_of(lambda logprobs: kl(logprobs, REFERENCE))
    assert (mean_slope(k3, REFERENCE) - forward).abs().max() > 0.05


def test_the_sampled_entropy_term_has_the_gradient_of_the_exact_one():
    """Planted bug: log π instead of half its square, whose mean gradient is zero."""

    def exact(logprobs: Tensor) -> Tensor:
        return (logprobs.exp() * logprobs).sum()

    torch.testing.assert_close(mean_slope(sampled_negative_entropy), slope_of(exact))


@pytest.mark.parametrize("estimator", [k2, k3])
def test_a_token_far_below_the_reference_gives_no_nan(estimator):
    """A hundred nats: float32 cannot represent the exponential of that."""
    logprobs = torch.tensor([-100.0, -1.0, -0.5], requires_grad=True)
    values = estimator(logprobs, torch.tensor([-0.1, -1.5, -100.0]))
    [gradient] = torch.autograd.grad((values * torch.tensor([0.0, 1.0, 1.0])).sum(), logprobs)
    assert values.isfinite().all()
    assert gradient.isfinite().all()
