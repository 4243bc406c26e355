"""The objective that the learner minimises over the tokens of a row; the settings choose its parts.

Legend: [N] response tokens of a row. w is the importance weight of a token and m its mask; both
correct for tokens that the engine sampled, perhaps with older weights, and have no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from april_rl.algorithm import off_policy
from april_rl.algorithm.kl import estimator, sampled_negative_entropy
from april_rl.algorithm.losses import LossFunction, LossInputs, loss_function
from april_rl.config.algorithm import AlgorithmConfig
from april_rl.config.choices import Ratio
from april_rl.learner.row import PackedRow


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLoss:
    """The loss of a row, and how each of its tokens was treated."""

    total: Tensor  # [], with gradient: this row's share of the sum over all rows of all ranks
    clipped: Tensor  # [N], bool: the loss clipped this token
    importance_weights: Tensor  # [N], w
    is_masked: Tensor  # [N], bool: m is 0
    metrics: Mapping[str, Tensor]  # [N] each, of a loss of the user's


class Objective:
    """Σ loss weight · w · m · (loss + entropy_coefficient · e + kl_coefficient · k) over tokens.

    e is the entropy bonus (`sampled_negative_entropy`), k the divergence from the frozen reference.
    """

    def __init__(self, config: AlgorithmConfig, *, loss: LossFunction | None = None) -> None:
        """Choose the parts of the objective; `loss` None: the built-in one of algorithm.loss.

        With `config.ratio` "proximal", the loss's ratio, w and m compare with the learner at the
        start of the update. With "behaviour", the ratio compares with the engine and so already is
        the importance weight; m (and w, for a loss without a ratio) uses the current learner.
        `config.opsm_threshold` always does.
        Otherwise w is 1, and then e and k of tokens from an older policy stay uncorrected.
        """
        self._is_bypass = config.ratio is Ratio.behaviour
        self._loss = loss or loss_function(config)
        self._weights = off_policy.importance_weights(config)
        self._masks = off_policy.masks(config)
        self._opsm_threshold = config.opsm_threshold
        self._entropy_coefficient = config.entropy_coefficient
        self._kl_coefficient = config.kl_coefficient
        self._kl = estimator(config.kl)
        self.needs_proximal = not self._is_bypass
        self.needs_reference = self._kl is not None

    def of(
        self, row: PackedRow, logprobs: Tensor, *, proximal: Tensor | None, reference: Tensor | None
    ) -> RowLoss:
        """Return the loss of a row.

        All arguments but `row` are log-probabilities [N]; only `logprobs` has a gradient.
        `proximal` None means the values of `logprobs`; `reference` None means no divergence term.
        """
        learner = logprobs.detach() if proximal is None else proximal
        behaviour, responses = row.behaviour_logprobs, row.responses
        inputs = LossInputs(
            logprobs=logprobs,
            anchor_logprobs=behaviour if self._is_bypass else learner,
            advantages=row.advantages,
            behaviour_logprobs=behaviour,
            responses=responses,
        )
        token_loss = self._loss(inputs)
        weights = self._weights(learner, behaviour, responses)
        masks = torch.ones_like(weights)
        for mask in self._masks:
            masks = masks * mask(learner, behaviour, responses)
        if self._opsm_threshold is not None:
            masks = masks * off_policy.negative_mask(inputs, threshold=self._opsm_threshold)
        values = token_loss.loss + self._penalties(logprobs, reference)
        return RowLoss(
            total=(row.loss_weights * weights * masks * values).sum(),
            clipped=token_loss.clipped,
            importance_weights=weights,
            is_masked=masks == 0,
            metrics=token_loss.metrics,
        )

    def _penalties(self, logprobs: Tensor, reference: Tensor | None) -> Tensor | float:
        """Return the terms that are added to the loss of each token."""
        penalties: Tensor | float = 0.0
        if self._entropy_coefficient:
            penalties = self._entropy_coefficient * sampled_negative_entropy(logprobs)
        if self._kl is not None and reference is not None:
            penalties = penalties + self._kl_coefficient * self._kl(logprobs, reference)
        return penalties
