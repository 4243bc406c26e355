"""Per-token policy losses as pure functions of tensors, and the choice among them
(`loss_function`).

Legend: [T] trained tokens. Log-probabilities are in nats, of the sampled token, at the sampling
temperature; A is the advantage, r the ratio exp(logprobs - anchor_logprobs), sg a stopped gradient.
A ratio is at most e^20 and has no gradient beyond (`ratio_of`).
Every loss is minimised, and none averages over a batch; at r = 1 the gradient of its sum over a
response, with respect to each log-probability, is -A.

What differs from the algorithms of the papers, and where it is decided:

- a token's loss is multiplied by its importance weight and mask (`off_policy`), which GRPO and DAPO
  do not have, because tokens may be older than the policy;
- the mean is over all trained tokens of the step, as in DAPO (algorithm.aggregation);
- GRPO's KL term (algorithm.kl) and DAPO's overlong penalty are off unless set;
- a batch is used for one optimizer step (trainer.num_minibatches=1, trainer.num_passes=1): ratios
  to the proximal policy are 1, and no bound takes effect.

docs/coming_from.md compares with TRL, verl and slime.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from april_rl.config.algorithm import AlgorithmConfig
from april_rl.config.choices import Loss
from april_rl.training.algorithm.ratio import ratio_of
from april_rl.training.algorithm.responses import Responses


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Inputs of a policy loss, on the learner's device; only `logprobs` has a gradient.

    They are the tokens of one row, which holds whole responses of this rank: a loss never sees
    other rows. So a loss is a sum over tokens (or over responses) without any mean, and each
    token's value is multiplied by its loss weight afterwards.

    The ratio is taken against `anchor_logprobs`. In decoupled mode (Hilton et al. 2022, "Batch
    size-invariance for policy optimization") these are the proximal log-probabilities, from the
    learner at the start of the step, and a weight of `off_policy` corrects for the distance between
    engine and learner. In bypass mode these are the behaviour log-probabilities, and the ratio
    itself is the whole importance weight.
    """

    logprobs: Tensor  # [T]
    anchor_logprobs: Tensor  # [T]
    advantages: Tensor  # [T]
    behaviour_logprobs: Tensor  # [T], of the engine when it sampled the token
    responses: Responses  # which tokens belong to one response


class TokenLoss(NamedTuple):
    """The loss of each token, and which tokens were clipped."""

    loss: Tensor  # [T]
    clipped: Tensor  # [T], bool: no gradient is left; in `cispo`, a weight that was cut
    # by name, [T] each; logged as loss/own/NAME, a mean over the trained tokens
    metrics: Mapping[str, Tensor] = MappingProxyType({})


LossFunction = Callable[[LossInputs], TokenLoss]


def loss_function(config: AlgorithmConfig) -> LossFunction:
    """Return the built-in function of algorithm.loss, with its settings bound."""
    low, high = config.clip_low, config.clip_high
    match Loss(config.loss):
        case Loss.ppo_clip:
            bound = math.inf if config.dual_clip is None else config.dual_clip
            return partial(ppo_clip, clip_low=low, clip_high=high, dual_clip=bound)
        case Loss.gspo:
            return partial(gspo, clip_low=low, clip_high=high)
        case Loss.cispo:
            return partial(cispo, clip_low=low, clip_high=high)
        case Loss.sapo:
            return sapo
        case Loss.dppo_tv:
            return partial(dppo, divergence=binary_tv, threshold_low=low, threshold_high=high)
        case Loss.dppo_kl:
            return partial(dppo, divergence=binary_kl, threshold_low=low, threshold_high=high)
        case Loss.policy_gradient:
            return policy_gradient


def policy_gradient(inputs: LossInputs) -> TokenLoss:
    """-A log π [T]; Williams 1992 (REINFORCE), without ratio, bound or anchor; nothing is clipped.

    It is correct for tokens of the policy that is trained; multiply it by a weight of `off_policy`
    for others.
    """
    loss = -inputs.advantages * inputs.logprobs
    return TokenLoss(loss, torch.zeros_like(loss, dtype=torch.bool))


def ppo_clip(
    inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float = math.inf
) -> TokenLoss:
    """-min(r A, clip(r) A), and for A < 0 at most -dual_clip A [T].

    Schulman et al. 2017, eq. 7, with DAPO's two bounds (Yu et al. 2025, eq. 10) and the dual clip
    of Ye et al. 2020 ("Mastering complex control in MOBA games with deep reinforcement learning"):
    a bad token whose ratio has run away above `dual_clip` > 1 (they take 3) no longer counts.
    Clipped: good tokens with a ratio above the upper bound, bad ones with a ratio below the lower
    one or above `dual_clip`.
    """
    ratio = ratio_of(inputs.logprobs - inputs.anchor_logprobs)
    return _clip(
        ratio, inputs.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )


def gspo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> TokenLoss:
    """-min(s A, clip(s) A) [T] with s = sg(geometric mean of r over the response) · π / sg(π);
    Zheng et al. 2025 (GSPO), eqs. 13 and 14, which clip to [1 - 3e-4, 1 + 4e-4].

    Value and gradient equal the ones of eq. 5, where the gradient of s flows to all tokens alike,
    if advantage and loss weight are constant within a response; otherwise each token's weight acts
    on that token alone, so that single tokens can be left out. verl's GSPO is this function, too;
    TRL's is eq. 5. Clipped: all tokens of a response, or none, if they share an advantage.
    """
    log_ratio = inputs.responses.means(inputs.logprobs - inputs.anchor_logprobs).detach()
    own = inputs.logprobs - inputs.logprobs.detach()  # zeros that carry the gradient
    ratio = ratio_of(inputs.responses.spread(log_ratio) + own)
    return _clip(ratio, inputs.advantages, clip_low=clip_low, clip_high=clip_high)


def cispo(inputs: LossInputs, *, clip_high: float, clip_low: float = 1.0) -> TokenLoss:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log π [T]; MiniMax 2025 (MiniMax-M1), eqs. 4, 5.

    The weight is clipped, not the update: every token keeps a gradient, even rare ones that PPO
    would drop. The paper has the upper bound only, which is `clip_low` 1. Clipped: the weight was
    cut, for either sign of the advantage.
    """
    ratio = ratio_of(inputs.logprobs - inputs.anchor_logprobs).detach()
    weights = ratio.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(-weights * inputs.advantages * inputs.logprobs, weights != ratio)


def sapo(
    inputs: LossInputs, *, positive_temperature: float = 1.0, negative_temperature: float = 1.05
) -> TokenLoss:
    """-(4 / τ) σ(τ (r - 1)) A [T]; Gao et al. 2025 (SAPO, arXiv 2511.20347), eqs. 5 and 6.

    τ is `positive_temperature` where A > 0, else `negative_temperature`; the defaults are the
    paper's. A soft gate replaces the hard clip: the gradient is the gradient of r A times 4 σ (1 -
    σ), which is 1 at r = 1 and falls on both sides, faster for a larger τ. Nothing is ever clipped.
    At r = 1 the value is -2 A / τ.
    """
    ratio = ratio_of(inputs.logprobs - inputs.anchor_logprobs)
    temperature = torch.full_like(ratio, negative_temperature).masked_fill(
        inputs.advantages > 0, positive_temperature
    )
    gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    return TokenLoss(-gate * inputs.advantages, torch.zeros_like(ratio, dtype=torch.bool))


def dppo(
    inputs: LossInputs,
    *,
    divergence: Callable[[Tensor, Tensor], Tensor],
    threshold_low: float,
    threshold_high: float,
) -> TokenLoss:
    """-r A with r = π / μ, and 0 for a token that has left the trust region [T]; Qi et al. 2026
    (DPPO, arXiv 2602.04879), eq. 12.

    μ is always the engine's policy when it sampled the token, so the configuration refuses
    algorithm.ratio=proximal. A token has left if its ratio went where A pushes it (above 1
    for A > 0, below 1 for A < 0) and the divergence is above `threshold_high` (A > 0) or
    `threshold_low` (A < 0). The paper has one threshold, 0.15 with `binary_tv` and 0.05 with
    `binary_kl`, and no bound of the ratio (verl's is 20). Clipped: the tokens that have left.
    """
    log_ratio = inputs.logprobs - inputs.behaviour_logprobs
    distance = divergence(inputs.logprobs.detach(), inputs.behaviour_logprobs)
    threshold = torch.where(inputs.advantages > 0, threshold_high, threshold_low)
    has_left = (log_ratio.detach() * inputs.advantages > 0) & (distance > threshold)
    return TokenLoss(-ratio_of(log_ratio).masked_fill(has_left, 0.0) * inputs.advantages, has_left)


def binary_tv(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """|π - μ| of the sampled token [T]: the total variation between "this token" and "another
    one"; DPPO, eq. 13. It is at most the total variation of the whole distributions.
    """
    return (logprobs.exp() - behaviour_logprobs.exp()).abs()


def binary_kl(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """μ log(μ / π) + (1 - μ) log((1 - μ) / (1 - π)) [T], KL(μ‖π) between "this token" and "another
    one"; DPPO, eq. 14. It is at most the divergence of the whole distributions.

    1 - π and 1 - μ are at least 1e-8, as in verl: float32 rounds probabilities near 1 to 1.
    """
    rest, rest_mu = ((-torch.expm1(p)).clamp(min=1e-8) for p in (logprobs, behaviour_logprobs))
    own = behaviour_logprobs.exp() * (behaviour_logprobs - logprobs)
    return own + rest_mu * (rest_mu.log() - rest.log())


def _clip(
    ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = math.inf,
) -> TokenLoss:
    """Return the clipped surrogate of a ratio [T], and where it has no gradient in that ratio."""
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    worst = torch.where(advantages < 0, -dual_clip * advantages, math.inf)
    is_above = (ratio > 1 + clip_high) & (advantages > 0)
    is_below = (ratio < 1 - clip_low) & (advantages < 0)
    is_worst = (ratio > dual_clip) & (advantages < 0)
    return TokenLoss(torch.minimum(loss, worst), is_above | is_below | is_worst)
