"""Per-token losses and importance weights: pure functions of tensors that sum over nothing.

Legend: [T] trained tokens. Log-probabilities are in nats, of the sampled token, at the sampling
temperature.
"""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_surrogate(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """Per-token PPO-clip loss [T], to be minimised; the ratio is exp(logprobs - proximal_logprobs).

    Schulman et al. 2017, eq. 7, with the two bounds of DAPO (Yu et al. 2025, eq. 10): the ratio is
    clipped to [1 - clip_low, 1 + clip_high]. All arguments are [T]; only `logprobs` has a gradient.
    """
    ratio = torch.exp(logprobs - proximal_logprobs)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def is_clipped(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """Whether `clipped_surrogate` gives a token no gradient because its ratio is out of bounds [T].

    That is above the upper bound when the advantage is positive, below the lower one when it is
    negative.
    """
    ratio = torch.exp(logprobs - proximal_logprobs)
    is_above = (ratio > 1 + clip_high) & (advantages > 0)
    is_below = (ratio < 1 - clip_low) & (advantages < 0)
    return is_above | is_below


def truncated_importance_weights(
    proximal_logprobs: Tensor, behaviour_logprobs: Tensor, *, cap: float
) -> Tensor:
    """min(exp(proximal - behaviour), cap) [T], without gradient.

    Truncated importance sampling: Ionides 2008; per token between engine and learner, Yao et al.
    2025 ("Your efficient RL framework secretly brings you off-policy RL training").
    """
    return torch.exp(proximal_logprobs - behaviour_logprobs).detach().clamp(max=cap)
