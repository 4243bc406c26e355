"""What a token that another policy sampled still counts: weights that multiply its loss.

Legend: [T] trained tokens, one response behind the other. Log-probabilities are in nats, of the
sampled token, at the sampling temperature. w = learner / engine is the ratio of a token: the first
argument less the second, exponentiated. Decoupled (the losses' ratio is against the proximal
log-probabilities), the learner is the one at the start of the step. In bypass the losses' ratio is
against the behaviour ones and already is the weight: no truncated weight then, but a mask still
makes sense, with the learner as it is now.

Nothing here has a gradient. Masks are 1 or 0 and multiply with each other and with a weight. What a
mask takes out is not taken out of the aggregation's denominator, which is known before the learner
has seen a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from april_rl.algorithm.responses import Responses
from april_rl.config.algorithm import AlgorithmConfig
from april_rl.config.choices import Correction

# From the learner's and the engine's log-probabilities [T] to weights or masks [T].
Weigh = Callable[[Tensor, Tensor, Responses], Tensor]


def importance_weights(config: AlgorithmConfig) -> Weigh:
    """Return the weight of algorithm.correction; without a correction, ones."""
    cap, low, high = config.tis_cap, config.mask_low, config.mask_high
    match config.correction:
        case Correction.none:
            return lambda learner, _behaviour, _responses: torch.ones_like(learner)
        case Correction.truncate:
            return _by_token(partial(truncated_importance_weights, cap=cap))
        case Correction.mask:
            return _by_token(partial(masked_importance_weights, low=low, high=high))
        case Correction.sequence_truncate:
            return partial(sequence_importance_weights, cap=cap)


def masks(config: AlgorithmConfig) -> list[Weigh]:
    """Return the masks that have bounds, each to be multiplied with the others."""
    found: list[Weigh] = []
    if config.correction is Correction.mask:
        low, high = config.mask_low, config.mask_high
        found.append(_by_token(partial(token_mask, low=low, high=high)))
    if config.sequence_mask is not None:
        low, high = config.sequence_mask
        found.append(partial(sequence_mask, low=low, high=high))
    if config.geometric_mask is not None:
        low, high = config.geometric_mask
        found.append(partial(geometric_mask, low=low, high=high))
    return found


def _by_token(weigh: Callable[[Tensor, Tensor], Tensor]) -> Weigh:
    return lambda learner, behaviour, _responses: weigh(learner, behaviour)


def truncated_importance_weights(
    proximal_logprobs: Tensor, behaviour_logprobs: Tensor, *, cap: float
) -> Tensor:
    """min(w, cap) [T], without gradient; `cap` inf: the plain importance weight.

    Truncated importance sampling: Ionides 2008; per token between engine and learner, Yao et al.
    2025 ("Your efficient RL framework secretly brings you off-policy RL training").
    """
    return torch.exp(proximal_logprobs - behaviour_logprobs).detach().clamp(max=cap)


def token_mask(
    learner_logprobs: Tensor, behaviour_logprobs: Tensor, *, low: float, high: float
) -> Tensor:
    """1 where w lies in [low, high], else 0 [T]."""
    return _within(learner_logprobs - behaviour_logprobs, low=low, high=high)


def masked_importance_weights(
    learner_logprobs: Tensor, behaviour_logprobs: Tensor, *, low: float, high: float
) -> Tensor:
    """w where it lies in [low, high], else 0 [T]; Ling Team 2025 (Ring-1T, arXiv 2510.18855,
    "IcePop"); 0.5 and 5 are usual bounds.

    Where truncation lets a token with a runaway ratio push at the cap, this one drops it, and those
    that the learner finds far less likely too.
    """
    mask = token_mask(learner_logprobs, behaviour_logprobs, low=low, high=high)
    return mask * truncated_importance_weights(learner_logprobs, behaviour_logprobs, cap=high)


def sequence_importance_weights(
    learner_logprobs: Tensor, behaviour_logprobs: Tensor, responses: Responses, *, cap: float
) -> Tensor:
    """min(∏ w, cap) over the response, for each of its tokens [T].

    The unbiased weight of a whole response, truncated: Liu et al. 2025 ("When speed kills
    stability: demystifying RL collapse from the training-inference mismatch"). The product's
    spread grows with length: on long responses most weights are near 0 or at the cap.
    """
    log_weights = responses.sums((learner_logprobs - behaviour_logprobs).detach())
    return responses.spread(log_weights.exp().clamp(max=cap))


def sequence_mask(
    learner_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    responses: Responses,
    *,
    low: float,
    high: float,
) -> Tensor:
    """1 where ∏ w over the response lies in [low, high], else 0, for each of its tokens [T].

    Liu et al. 2025, as above, whose masked sequence weight is this times
    `sequence_importance_weights`.
    """
    log_weights = responses.sums((learner_logprobs - behaviour_logprobs).detach())
    return responses.spread(_within(log_weights, low=low, high=high))


def geometric_mask(
    learner_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    responses: Responses,
    *,
    low: float,
    high: float,
) -> Tensor:
    """1 where the geometric mean of w over the response lies in [low, high], else 0, for each of
    its tokens [T].

    The mean's spread does not grow with length, so one pair of bounds near 1 serves all lengths
    (the response's ratio of GSPO, Zheng et al. 2025, eq. 7, as a criterion).
    """
    log_weights = responses.means((learner_logprobs - behaviour_logprobs).detach())
    return responses.spread(_within(log_weights, low=low, high=high))


def _within(log_weights: Tensor, *, low: float, high: float) -> Tensor:
    """1 where the logarithm of a weight lies between those of the bounds, else 0; in logarithms, a
    product of many ratios cannot overflow.
    """
    floor = math.log(low) if low > 0 else -math.inf
    values = log_weights.detach()
    return ((values >= floor) & (values <= math.log(high))).to(values.dtype)
