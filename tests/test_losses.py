"""Per-token losses: values and gradients that can be worked out by hand."""

import math

import torch

from april_rl.algorithm.losses import clipped_surrogate, is_clipped, truncated_importance_weights

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
RATIOS = torch.tensor([0.5, 0.9, 1.0, 1.25, 2.0])


def surrogate_and_slope(advantage: float) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = RATIOS.log().requires_grad_()
    loss = clipped_surrogate(logprobs, torch.zeros(5), torch.full((5,), advantage), **CLIP)
    [slope] = torch.autograd.grad(loss.sum(), logprobs)
    return loss.detach(), slope


def test_a_good_token_is_not_pushed_beyond_the_upper_bound():
    loss, slope = surrogate_and_slope(2.0)
    torch.testing.assert_close(loss, -2 * torch.tensor([0.5, 0.9, 1.0, 1.25, 1.28]))
    torch.testing.assert_close(slope, -2 * torch.tensor([0.5, 0.9, 1.0, 1.25, 0.0]))


def test_a_bad_token_is_not_pushed_below_the_lower_bound():
    loss, slope = surrogate_and_slope(-1.0)
    torch.testing.assert_close(loss, torch.tensor([0.8, 0.9, 1.0, 1.25, 2.0]))
    torch.testing.assert_close(slope, torch.tensor([0.0, 0.9, 1.0, 1.25, 2.0]))


def test_clipped_tokens_are_those_without_a_gradient():
    for advantage in (2.0, -1.0):
        _, slope = surrogate_and_slope(advantage)
        clipped = is_clipped(RATIOS.log(), torch.zeros(5), torch.full((5,), advantage), **CLIP)
        assert clipped.tolist() == (slope == 0).tolist()


def test_importance_weights_are_capped_and_carry_no_gradient():
    proximal = torch.tensor([-1.0, -2.0, -1.0], requires_grad=True)
    behaviour = torch.tensor([-1.5, -1.0, -4.0])
    weights = truncated_importance_weights(proximal, behaviour, cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([math.exp(0.5), math.exp(-1.0), 2.0]))
    assert not weights.requires_grad
