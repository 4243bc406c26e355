"""What the learner minimises over the tokens of a row; its parts are chosen once, by name.

Legend: [N] response tokens of a row. w is the importance weight of a token, m the masks: both say
what it counts for being sampled by the engine, perhaps with older weights, and have no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

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
from april_rl.learner.row import PackedRow

LossName = Literal["ppo_clip", "gspo", "gspo_token", "cispo", "sapo", "policy_gradient"]
RatioName = Literal["proximal", "behaviour"]
CorrectionName = Literal["none", "truncate", "mask", "sequence_truncate"]
KlName = Literal["none", "k2", "k3"]
Bounds = Sequence[float] | None  # [low, high]

Loss = Callable[[LossInputs], TokenLoss]
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

    def __init__(
        self,
        *,
        loss: LossName,
        ratio: RatioName,
        clip_low: float,
        clip_high: float,
        dual_clip: float | None,
        sapo_positive_temperature: float,
        sapo_negative_temperature: float,
        correction: CorrectionName,
        tis_cap: float,
        mask_low: float,
        mask_high: float,
        sequence_mask: Bounds,
        geometric_mask: Bounds,
        entropy_coefficient: float,
        kl: KlName,
        kl_coefficient: float,
    ) -> None:
        """`ratio`: "proximal" takes the loss's ratio, w and m against the learner at the start of
        the update; "behaviour" takes the ratio against the engine, which then is the importance
        weight itself, and m (w too, for a loss without ratio) with the learner as it is; w being 1
        otherwise, e and k of tokens of an older policy stay uncorrected then.
        """
        self._is_bypass = ratio == "behaviour"
        losses: dict[LossName, Loss] = {
            "ppo_clip": partial(
                ppo_clip, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip or math.inf
            ),
            "gspo": partial(gspo, clip_low=clip_low, clip_high=clip_high),
            "gspo_token": partial(gspo_token, clip_low=clip_low, clip_high=clip_high),
            "cispo": partial(cispo, clip_low=clip_low, clip_high=clip_high),
            "sapo": partial(
                sapo,
                positive_temperature=sapo_positive_temperature,
                negative_temperature=sapo_negative_temperature,
            ),
            "policy_gradient": policy_gradient,
        }
        self._loss = losses[loss]
        self._weights = _weights(correction, cap=tis_cap, low=mask_low, high=mask_high)
        of_tokens = (mask_low, mask_high) if correction == "mask" else None
        self._masks = _masks(of_tokens, sequence_mask, geometric_mask)
        self._entropy_coefficient, self._kl_coefficient = entropy_coefficient, kl_coefficient
        self._kl: Penalty = k2 if kl == "k2" else k3
        self.needs_proximal = not self._is_bypass
        self.needs_reference = kl != "none" and kl_coefficient > 0

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


def _weights(name: CorrectionName, *, cap: float, low: float, high: float) -> Weigh:
    """w: ones for "none"."""
    chosen: dict[CorrectionName, Weigh] = {
        "none": lambda learner, _behaviour, _responses: torch.ones_like(learner),
        "truncate": _by_token(partial(truncated_importance_weights, cap=cap)),
        "mask": _by_token(partial(masked_importance_weights, low=low, high=high)),
        "sequence_truncate": _by_response(off_policy.sequence_importance_weights, cap=cap),
    }
    return chosen[name]


def _masks(of_tokens: Bounds, of_sequences: Bounds, of_means: Bounds) -> list[Weigh]:
    """The masks that have bounds, each to be multiplied with the others."""
    masks = []
    if of_tokens is not None:
        low, high = of_tokens
        masks.append(_by_token(partial(token_mask, low=low, high=high)))
    if of_sequences is not None:
        low, high = of_sequences
        masks.append(_by_response(off_policy.sequence_mask, low=low, high=high))
    if of_means is not None:
        low, high = of_means
        masks.append(_by_response(off_policy.geometric_mask, low=low, high=high))
    return masks


def _by_token(weigh: Callable[[Tensor, Tensor], Tensor]) -> Weigh:
    return lambda learner, behaviour, _responses: weigh(learner, behaviour)


def _by_response(weigh: Callable[..., Tensor], **bounds: float) -> Weigh:
    return lambda learner, behaviour, responses: weigh(
        learner, behaviour, responses=responses, **bounds
    )
