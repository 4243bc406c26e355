"""What the learner minimises over the tokens of a row; its parts are chosen once, by the settings.

Legend: [N] response tokens of a row. w is the importance weight of a token, m the masks: both say
what it counts for being sampled by the engine, perhaps with older weights, and have no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from april_rl.algorithm import off_policy
from april_rl.algorithm.entropy import sampled_negative_entropy
from april_rl.algorithm.kl import k2, k3
from april_rl.algorithm.losses import (
    LossInputs,
    TokenLoss,
    cispo,
    gspo,
    gspo_token,
    policy_gradient,
    ppo_clip,
    sapo,
)
from april_rl.algorithm.off_policy import (
    masked_importance_weights,
    token_mask,
    truncated_importance_weights,
)
from april_rl.algorithm.responses import Responses
from april_rl.config.algorithm import AlgorithmConfig
from april_rl.config.choices import Correction, Kl, Loss, Ratio
from april_rl.learner.row import PackedRow

LossFunction = Callable[[LossInputs], TokenLoss]
# From the learner's and the engine's log-probabilities [N] to weights or masks [N].
Weigh = Callable[[Tensor, Tensor, Responses], Tensor]
Penalty = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLoss:
    """The loss of a row and what became of its tokens."""

    total: Tensor  # [], with gradient: this row's share of the sum over all rows of all ranks
    clipped: Tensor  # [N], bool, as the loss says
    importance_weights: Tensor  # [N], w
    is_masked: Tensor  # [N], bool: m is 0


class Objective:
    """Σ loss weight · w · m · (loss + entropy_coefficient · e + kl_coefficient · k), e the bonus of
    `sampled_negative_entropy`, k the divergence from the frozen reference.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        """`config.ratio`: "proximal" takes the loss's ratio, w and m against the learner at the
        start of the update; "behaviour" takes the ratio against the engine, which then is the
        importance weight itself, and m (w too, for a loss without ratio) with the learner as it is;
        w being 1 otherwise, e and k of tokens of an older policy stay uncorrected then.
        """
        self._is_bypass = config.ratio is Ratio.behaviour
        self._loss = _loss(config)
        self._weights = _weights(config)
        self._masks = _masks(config)
        self._entropy_coefficient = config.entropy_coefficient
        self._kl_coefficient = config.kl_coefficient
        self._kl: Penalty = k2 if config.kl is Kl.k2 else k3
        self.needs_proximal = not self._is_bypass
        self.needs_reference = config.kl is not Kl.none

    def of(
        self, row: PackedRow, logprobs: Tensor, *, proximal: Tensor | None, reference: Tensor | None
    ) -> RowLoss:
        """The loss of a row; its arguments are log-probabilities [N], of which `logprobs` has a
        gradient.

        `proximal` None: they are `logprobs` as they stand. `reference` None: no divergence term.
        """
        learner = logprobs.detach() if proximal is None else proximal
        behaviour, responses = row.behaviour_logprobs, row.responses
        inputs = LossInputs(
            logprobs=logprobs,
            anchor_logprobs=behaviour if self._is_bypass else learner,
            advantages=row.advantages,
            responses=responses,
        )
        token_loss = self._loss(inputs)
        weights = self._weights(learner, behaviour, responses)
        masks = torch.ones_like(weights)
        for mask in self._masks:
            masks = masks * mask(learner, behaviour, responses)
        values = token_loss.loss + self._penalties(logprobs, reference)
        return RowLoss(
            total=(row.loss_weights * weights * masks * values).sum(),
            clipped=token_loss.clipped,
            importance_weights=weights,
            is_masked=masks == 0,
        )

    def _penalties(self, logprobs: Tensor, reference: Tensor | None) -> Tensor | float:
        """What is added to the loss of each token."""
        penalties: Tensor | float = 0.0
        if self._entropy_coefficient:
            penalties = self._entropy_coefficient * sampled_negative_entropy(logprobs)
        if reference is not None:
            penalties = penalties + self._kl_coefficient * self._kl(logprobs, reference)
        return penalties


def _loss(config: AlgorithmConfig) -> LossFunction:
    low, high = config.clip_low, config.clip_high
    losses: dict[Loss, LossFunction] = {
        Loss.ppo_clip: partial(
            ppo_clip, clip_low=low, clip_high=high, dual_clip=config.dual_clip or math.inf
        ),
        Loss.gspo: partial(gspo, clip_low=low, clip_high=high),
        Loss.gspo_token: partial(gspo_token, clip_low=low, clip_high=high),
        Loss.cispo: partial(cispo, clip_low=low, clip_high=high),
        Loss.sapo: partial(
            sapo,
            positive_temperature=config.sapo_positive_temperature,
            negative_temperature=config.sapo_negative_temperature,
        ),
        Loss.policy_gradient: policy_gradient,
    }
    return losses[config.loss]


def _weights(config: AlgorithmConfig) -> Weigh:
    """Return w: ones without a correction."""
    cap, low, high = config.tis_cap, config.mask_low, config.mask_high
    chosen: dict[Correction, Weigh] = {
        Correction.none: lambda learner, _behaviour, _responses: torch.ones_like(learner),
        Correction.truncate: _by_token(partial(truncated_importance_weights, cap=cap)),
        Correction.mask: _by_token(partial(masked_importance_weights, low=low, high=high)),
        Correction.sequence_truncate: _by_response(off_policy.sequence_importance_weights, cap=cap),
    }
    return chosen[config.correction]


def _masks(config: AlgorithmConfig) -> list[Weigh]:
    """Return the masks that have bounds, each to be multiplied with the others."""
    masks = []
    if config.correction is Correction.mask:
        masks.append(_by_token(partial(token_mask, low=config.mask_low, high=config.mask_high)))
    if config.sequence_mask is not None:
        low, high = config.sequence_mask
        masks.append(_by_response(off_policy.sequence_mask, low=low, high=high))
    if config.geometric_mask is not None:
        low, high = config.geometric_mask
        masks.append(_by_response(off_policy.geometric_mask, low=low, high=high))
    return masks


def _by_token(weigh: Callable[[Tensor, Tensor], Tensor]) -> Weigh:
    return lambda learner, behaviour, _responses: weigh(learner, behaviour)


def _by_response(weigh: Callable[..., Tensor], **bounds: float) -> Weigh:
    return lambda learner, behaviour, responses: weigh(
        learner, behaviour, responses=responses, **bounds
    )
