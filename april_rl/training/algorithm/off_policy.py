"""Weights and masks that multiply the loss of tokens that another policy sampled.

Legend: [T] trained tokens of all responses, concatenated. Log-probabilities are in nats, of the
sampled token, at the sampling temperature. w = learner / engine is the ratio of a token: exp(first
argument - second argument). In decoupled mode, where the loss takes its ratio against the proximal
log-probabilities, "learner" means the weights at the start of the step. In bypass mode, the loss
takes its ratio against the behaviour log-probabilities. That ratio already is the importance
weight, so there is no truncated weight, but a mask with the learner's current weights still makes
sense.

Nothing here has a gradient. Masks are 1 or 0 and multiply each other and a weight. A masked token
stays in the aggregation's denominator, which is known before the learner has seen a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from april_rl.config.algorithm import AlgorithmConfig
from april_rl.config.choices import Correction
from april_rl.training.algorithm.losses import LossInputs
from april_rl.training.algorithm.ratio import ratio_of
from april_rl.training.algorithm.responses import Responses

# Maps the learner's and the engine's log-probabilities [T] to weights or masks [T].
Weigh = Callable[[Tensor, Tensor, Responses], Tensor]


def importance_weights(config: AlgorithmConfig) -> Weigh:
    """Return the weight function of algorithm.correction; ones without a correction."""
    low, high = config.weight_bounds or config.correction.usual_bounds
    match config.correction:
        case Correction.none:
            return lambda learner, _behaviour, _responses: torch.ones_like(learner)
        case Correction.truncate:
            return _by_token(partial(truncated_importance_weights, cap=high))
        case Correction.mask:
            return _by_token(partial(masked_importance_weights, low=low, high=high))
        case Correction.sequence_truncate:
            return partial(sequence_importance_weights, cap=high)


def masks(config: AlgorithmConfig) -> list[Weigh]:
    """Return the masks whose bounds are set; their product is the mask."""
    found: list[Weigh] = []
    if config.correction is Correction.mask:
        low, high = config.weight_bounds or config.correction.usual_bounds
        found.append(_by_token(partial(token_mask, low=low, high=high)))
    if config.geometric_mask is not None:
        low, high = config.geometric_mask
        found.append(partial(geometric_mask, low=low, high=high))
    return found


def _by_token(weigh: Callable[[Tensor, Tensor], Tensor]) -> Weigh:
    return lambda learner, behaviour, _responses: weigh(learner, behaviour)


def truncated_importance_weights(
    proximal_logprobs: Tensor, behaviour_logprobs: Tensor, *, cap: float
) -> Tensor:
    """min(w, cap) [T], without gradient; with `cap` inf it is the plain weight, at most e^20.

    Truncated importance sampling: Ionides 2008; per token between engine and learner, Yao et al.
    2025 ("Your efficient RL framework secretly brings you off-policy RL training").
    """
    return ratio_of(proximal_logprobs - behaviour_logprobs).detach().clamp(max=cap)


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

    Truncation keeps a token with a very large ratio at weight `cap`; this one drops it, and also
    tokens that the learner finds far less likely than the engine did.
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
    return responses.spread(ratio_of(log_weights).clamp(max=cap))


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

    The spread of a mean does not grow with length, so one pair of bounds near 1 fits all lengths
    (the response's ratio of GSPO, Zheng et al. 2025, eq. 7, used as a criterion).
    """
    log_weights = responses.means((learner_logprobs - behaviour_logprobs).detach())
    return responses.spread(_within(log_weights, low=low, high=high))


def negative_mask(inputs: LossInputs, *, threshold: float) -> Tensor:
    """0 where A < 0 and the mean of log(engine / learner) over the response is above `threshold`,
    else 1 [T]; DeepSeek-AI 2025 (DeepSeek-V3.2, arXiv 2512.02556), section 3.1, "off-policy
    sequence masking".

    A bad response that the policy has left makes training unstable; a good one is kept however
    far away it is. "Learner" means its current weights, in decoupled and in bypass mode.
    """
    log_ratio = (inputs.behaviour_logprobs - inputs.logprobs).detach()
    has_left = inputs.responses.spread(inputs.responses.means(log_ratio)) > threshold
    return (~(has_left & (inputs.advantages < 0))).to(log_ratio.dtype)


def _within(log_weights: Tensor, *, low: float, high: float) -> Tensor:
    """1 where a weight, given by its logarithm, lies within the bounds, else 0.

    The comparison is made on logarithms, so that a product of many ratios cannot overflow.
    """
    floor = math.log(low) if low > 0 else -math.inf
    values = log_weights.detach()
    return ((values >= floor) & (values <= math.log(high))).to(values.dtype)
