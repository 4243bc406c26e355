"""Per-token losses: values and gradients that can be worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from april_rl.training.algorithm.losses import (
    LossInputs,
    TokenLoss,
    binary_kl,
    binary_tv,
    cispo,
    dppo,
    gspo,
    policy_gradient,
    ppo_clip,
    sapo,
)
from april_rl.training.algorithm.off_policy import truncated_importance_weights
from april_rl.training.algorithm.ratio import ratio_of
from april_rl.training.algorithm.responses import Responses

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
RATIOS = torch.tensor([0.5, 0.9, 1.0, 1.25, 2.0])
LOSSES = {
    "policy_gradient": policy_gradient,
    "ppo_clip": lambda inputs: ppo_clip(inputs, **CLIP, dual_clip=3.0),
    "gspo": lambda inputs: gspo(inputs, **CLIP),
    "cispo": lambda inputs: cispo(inputs, clip_high=0.28),
    "sapo": sapo,
    "dppo_tv": lambda inputs: dppo(
        inputs, divergence=binary_tv, threshold_low=0.15, threshold_high=0.15
    ),
    "dppo_kl": lambda inputs: dppo(
        inputs, divergence=binary_kl, threshold_low=0.05, threshold_high=0.05
    ),
}


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


def surrogate(advantage: float) -> tuple[TokenLoss, LossInputs]:
    inputs = inputs_of(RATIOS.log(), torch.full((5,), advantage), [5])
    return ppo_clip(inputs, **CLIP), inputs


def test_a_good_token_is_not_pushed_beyond_the_upper_bound():
    loss, inputs = surrogate(2.0)
    torch.testing.assert_close(loss.loss.detach(), -2 * torch.tensor([0.5, 0.9, 1.0, 1.25, 1.28]))
    torch.testing.assert_close(slope(loss, inputs), -2 * torch.tensor([0.5, 0.9, 1.0, 1.25, 0.0]))


def test_a_bad_token_is_not_pushed_below_the_lower_bound():
    loss, inputs = surrogate(-1.0)
    torch.testing.assert_close(loss.loss.detach(), torch.tensor([0.8, 0.9, 1.0, 1.25, 2.0]))
    torch.testing.assert_close(slope(loss, inputs), torch.tensor([0.0, 0.9, 1.0, 1.25, 2.0]))


@pytest.mark.parametrize("name", LOSSES)
def test_at_ratio_one_every_loss_has_the_same_gradient(name):
    """It is minus the advantage, summed over a response: with one optimizer step per batch the
    choice of loss does not matter, least of all between GRPO and GSPO. Planted bug: SAPO's gate
    without its factor 4.
    """
    advantages = torch.tensor([1.5, 1.5, 1.5, -0.5, -0.5, 0.0], dtype=torch.float64)
    inputs = inputs_of(torch.zeros(6, dtype=torch.float64), advantages, [3, 2, 1])
    loss = LOSSES[name](inputs)
    torch.testing.assert_close(slope(loss, inputs), -advantages)
    assert not loss.clipped.any()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("name", [*LOSSES, "unbounded ppo_clip"])
def test_a_ratio_beyond_float32_gives_no_nan(name, advantage):
    """Nor does a response of such tokens, even with loss weight 0. Fails when exp overflows: the
    gradient of a branch that is not taken is then 0 · inf.
    """
    loss_of = LOSSES.get(name, lambda inputs: ppo_clip(inputs, **CLIP))
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


def test_at_ratio_one_the_surrogates_are_minus_the_advantage():
    advantages = torch.tensor([1.5, -0.5, 0.0])
    inputs = inputs_of(torch.zeros(3), advantages, [1, 2])
    for name in ("ppo_clip", "gspo", "dppo_tv", "dppo_kl"):
        torch.testing.assert_close(LOSSES[name](inputs).loss.detach(), -advantages)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "dppo_tv", "dppo_kl"])
def test_clipped_tokens_are_exactly_those_without_a_gradient(name):
    """Planted bug: tokens beyond the dual clip are not counted."""
    ratios = torch.tensor([0.5, 0.9, 1.0, 1.25, 2.0, 3.5], dtype=torch.float64)
    for advantage in (2.0, -1.0, 0.5):
        inputs = inputs_of(ratios.log(), torch.full_like(ratios, advantage), [1] * 6)
        loss = LOSSES[name](inputs)
        assert loss.clipped.tolist() == (slope(loss, inputs) == 0).tolist()


def test_the_dual_clip_stops_a_bad_token_with_a_very_large_ratio_and_not_good_tokens():
    """Planted bug: the dual clip is also applied to good tokens."""
    ratios = torch.tensor([2.0, 3.5, 10.0, 0.5])
    inputs = inputs_of(ratios.log(), torch.tensor([-1.0, -1.0, -2.0, 2.0]), [4])
    loss = ppo_clip(inputs, **CLIP, dual_clip=3.0)
    torch.testing.assert_close(loss.loss.detach(), torch.tensor([2.0, 3.0, 6.0, -1.0]))
    assert loss.clipped.tolist() == [False, True, True, False]
    torch.testing.assert_close(slope(loss, inputs), torch.tensor([2.0, 0.0, 0.0, -1.0]))


def test_gspo_clips_a_response_as_a_whole():
    """A response with ratios 2 and 1/2 is unchanged on average and not clipped; one with 2 and 2 is
    clipped. Planted bug: the ratio of the whole row instead of the response.
    """
    log_ratios = torch.tensor([2.0, 0.5, 2.0, 2.0]).log()
    inputs = inputs_of(log_ratios, torch.ones(4), [2, 2])
    loss = gspo(inputs, **CLIP)
    torch.testing.assert_close(loss.loss.detach(), -torch.tensor([1.0, 1.0, 1.28, 1.28]))
    assert loss.clipped.tolist() == [False, False, True, True]


def test_the_gradient_of_gspo_is_that_of_one_ratio_where_weights_are_equal() -> None:
    """With equal weights it equals the one of eq. 5, in which the mean ratio has the gradient;
    otherwise each weight acts on its token alone. Planted bug: the mean ratio is not stopped.
    """
    log_ratios = torch.tensor([0.1, -0.05, 0.02], dtype=torch.float64)
    inputs = inputs_of(log_ratios, torch.full((3,), 2.0, dtype=torch.float64), [3])
    mean = (inputs.logprobs - inputs.anchor_logprobs).mean().exp()
    [whole] = torch.autograd.grad(-2 * 3 * mean, inputs.logprobs)
    torch.testing.assert_close(slope(gspo(inputs, **CLIP), inputs), whole)
    weights = torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)
    torch.testing.assert_close(slope(gspo(inputs, **CLIP), inputs, weights), whole * weights)


def test_cispo_clips_weights_and_keeps_every_gradient():
    """Planted bug: the gradient also flows through the weight."""
    ratios = torch.tensor([0.01, 0.9, 2.0, 2.0])
    inputs = inputs_of(ratios.log(), torch.tensor([1.0, -1.0, 1.0, -1.0]), [4])
    loss = cispo(inputs, clip_high=0.28)
    assert loss.clipped.tolist() == [False, False, True, True]
    torch.testing.assert_close(slope(loss, inputs), torch.tensor([-0.01, 0.9, -1.28, 1.28]))
    bounded = cispo(inputs, clip_high=0.28, clip_low=0.5)
    torch.testing.assert_close(slope(bounded, inputs)[0], torch.tensor(-0.5))


def test_sapo_fades_the_gradient_on_both_sides_and_faster_for_bad_tokens():
    """The factor is 4 σ (1 - σ) = 1 / cosh²(τ (r - 1) / 2). Planted bug: one
    temperature for all.
    """
    ratios = torch.tensor([0.5, 1.0, 3.0, 3.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    inputs = inputs_of(ratios.log(), advantages, [4])
    loss = sapo(inputs, positive_temperature=1.0, negative_temperature=2.0)
    taus = torch.tensor([1.0, 1.0, 1.0, 2.0], dtype=torch.float64)
    fading = 1 / torch.cosh(taus * (ratios - 1) / 2) ** 2
    torch.testing.assert_close(slope(loss, inputs), -advantages * ratios * fading)
    assert not loss.clipped.any()


def test_dppo_lets_the_ratio_of_rare_tokens_change_a_lot_and_of_likely_ones_only_a_little():
    """Probabilities 0.001 to 0.01 (ratio 10), 0.5 to 0.7 (ratio 1.4) and 0.9 to 0.6; a token is
    masked only if it moved in the direction of its advantage. Planted bugs: a mask by the ratio; a
    mask that ignores the sign of the advantage.
    """
    behaviour = torch.tensor([0.001, 0.5, 0.9, 0.001, 0.5, 0.9], dtype=torch.float64).log()
    logprobs = torch.tensor([0.01, 0.7, 0.6, 0.01, 0.7, 0.6], dtype=torch.float64).log()
    inputs = LossInputs(
        logprobs=logprobs.requires_grad_(),
        anchor_logprobs=logprobs.detach(),
        advantages=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64),
        behaviour_logprobs=behaviour,
        responses=Responses.of([3, 3]),
    )
    expected = torch.tensor([10, 0, 0.6 / 0.9, -10, -1.4, 0], dtype=torch.float64)
    for name in ("dppo_tv", "dppo_kl"):
        loss = LOSSES[name](inputs)
        torch.testing.assert_close(-slope(loss, inputs), expected)
        assert loss.clipped.tolist() == [False, True, False, False, False, True]


def test_probabilities_that_float32_rounds_to_one_have_a_small_finite_divergence():
    """Planted bug: no lower bound of 1 - π, so that π = 1 is infinitely far from μ = 1 - 1e-7."""
    logprobs = torch.tensor([0.0, -1e-7, 0.0, math.log(0.5)])
    behaviour = torch.tensor([-1e-7, 0.0, 0.0, 0.0])
    near, far = binary_kl(logprobs, behaviour).split([3, 1])
    assert (near.abs() < 1e-6).all()
    torch.testing.assert_close(far, torch.tensor([math.log(2)]))


def test_importance_weights_are_capped_and_have_no_gradient():
    proximal = torch.tensor([-1.0, -2.0, -1.0], requires_grad=True)
    behaviour = torch.tensor([-1.5, -1.0, -4.0])
    weights = truncated_importance_weights(proximal, behaviour, cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([math.exp(0.5), math.exp(-1.0), 2.0]))
    assert not weights.requires_grad
