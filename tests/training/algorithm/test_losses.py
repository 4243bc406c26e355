"""Per-token losses: values and gradients that can be worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from april_rl.config.algorithm import AlgorithmConfig
from april_rl.config.choices import Correction, Loss, Ratio
from april_rl.training.algorithm.losses import LossInputs, TokenLoss, binary_kl, loss_function
from april_rl.training.algorithm.ratio import ratio_of
from april_rl.training.algorithm.responses import Responses

BYPASS = {"ratio": Ratio.behaviour, "correction": Correction.none}
LOSSES = {loss.name: AlgorithmConfig(loss=loss.name, **BYPASS) for loss in Loss}
LOSSES["dual_clip"] = AlgorithmConfig(loss="ppo_clip", dual_clip=3.0, **BYPASS)


def inputs_of(log_ratios: Tensor, advantages: Tensor, lengths: list[int]) -> LossInputs:
    """Return log-probabilities around -1 that can be differentiated, at these ratios to their
    anchor.
    """
    anchor = torch.linspace(-2, -0.5, len(log_ratios), dtype=log_ratios.dtype)
    return LossInputs(
        logprobs=(anchor + log_ratios).requires_grad_(),
        anchor_logprobs=anchor,
        advantages=advantages,
        behaviour_logprobs=anchor,
        responses=Responses.of(lengths),
    )


def slope(loss: TokenLoss, inputs: LossInputs, weights: Tensor | float = 1.0) -> Tensor:
    [gradient] = torch.autograd.grad((loss.loss * weights).sum(), inputs.logprobs)
    return gradient


@pytest.mark.parametrize("name", LOSSES)
def test_at_ratio_one_every_loss_has_the_same_gradient(name):
    """It is minus the advantage, summed over a response: with one optimizer step per batch the
    choice of loss does not matter, least of all between GRPO and GSPO. Planted bug: SAPO's gate
    without its factor 4.
    """
    advantages = torch.tensor([1.5, 1.5, 1.5, -0.5, -0.5, 0.0], dtype=torch.float64)
    inputs = inputs_of(torch.zeros(6, dtype=torch.float64), advantages, [3, 2, 1])
    loss = loss_function(LOSSES[name])(inputs)
    torch.testing.assert_close(slope(loss, inputs), -advantages)
    assert not loss.clipped.any()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("name", LOSSES)
def test_a_ratio_beyond_float32_gives_no_nan(name, advantage):
    """Nor does a response of such tokens, even with loss weight 0. Fails when exp overflows: the
    gradient of a branch that is not taken is then 0 · inf.
    """
    loss_of = loss_function(LOSSES[name])
    log_ratios = torch.tensor([0.1, 100.0, -100.0, 1e4, 200.0, 300.0])
    inputs = inputs_of(log_ratios, torch.full((6,), advantage), [4, 2])
    loss = loss_of(inputs)
    assert loss.loss.isfinite().all()
    for weights in (1.0, torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0])):
        assert slope(loss_of(inputs), inputs, weights).isfinite().all()


@pytest.mark.parametrize("log_ratio", [-80.0, -3.0, 0.0, 0.2, 5.0, 19.9, 20.0])
def test_a_ratio_within_the_bound_is_bit_identical_to_exp(log_ratio):
    given = torch.tensor([log_ratio], requires_grad=True)
    [found], [plain] = ratio_of(given), given.exp()
    assert found == plain
    assert torch.autograd.grad(found, given) == torch.autograd.grad(plain, given)


def test_probabilities_that_float32_rounds_to_one_have_a_small_finite_divergence():
    """Planted bug: no lower bound of 1 - π, so that π = 1 is infinitely far from μ = 1 - 1e-7."""
    logprobs = torch.tensor([0.0, -1e-7, 0.0, math.log(0.5)])
    behaviour = torch.tensor([-1e-7, 0.0, 0.0, 0.0])
    near, far = binary_kl(logprobs, behaviour).split([3, 1])
    assert (near.abs() < 1e-6).all()
    torch.testing.assert_close(far, torch.tensor([math.log(2)]))
