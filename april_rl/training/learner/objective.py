"""The objective that the learner minimises over the tokens of a row; the settings choose its parts.

Legend: [N] response tokens of a row. w is the importance weight of a token and m its mask; both
correct for tokens that the engine sampled, perhaps with older weights, and have no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from april_rl.config.algorithm import AlgorithmConfig
from april_rl.config.choices import Kl, Ratio
from april_rl.config.user_code import OwnFunctionError
from april_rl.training.algorithm import off_policy
from april_rl.training.algorithm.kl import estimator, k1_to_go, sampled_negative_entropy
from april_rl.training.algorithm.losses import LossFunction, LossInputs, TokenLoss, loss_function
from april_rl.training.learner.row import Anchor, PackedRow


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLoss:
    """The loss of a row, and how each of its tokens was treated."""

    total: Tensor  # [], with gradient: this row's share of the sum over all rows of all ranks
    clipped: Tensor  # [N], bool: the loss clipped this token
    importance_weights: Tensor  # [N], w
    is_masked: Tensor  # [N], bool: m is 0
    metrics: Mapping[str, Tensor]  # [N] each, from the user's own loss


Watch = Callable[[PackedRow, LossInputs, RowLoss], None]


class EntropyBonus:
    """The weight of the entropy bonus: constant, or adapted once a step to algorithm.entropy_target
    (He et al. 2025, Skywork-OR1, adaptive entropy control).

    A coefficient grows by DELTA after a step whose mean entropy is below the target, and falls by
    DELTA after every other one, not below 0. The next step's weight is the coefficient if that
    entropy is not above the target, and 0 otherwise. The first step's weight is 0, too. The paper
    takes the entropy of the step itself, which would cost a forward pass before each update.
    """

    DELTA = 0.005  # the paper's

    def __init__(self, config: AlgorithmConfig) -> None:
        self._target, self._coefficient = config.entropy_target, config.entropy_coefficient
        self._entropy: float | None = None  # nats, of the last step; None before the first one

    @property
    def is_adapted(self) -> bool:
        return self._target is not None

    @property
    def weight(self) -> float:
        if self._target is None:
            return self._coefficient
        is_low = self._entropy is not None and self._entropy <= self._target
        return self._coefficient if is_low else 0.0

    def adapt(self, entropy: float) -> None:
        """Set the weight of the next step; `entropy` is the mean of this one over all ranks."""
        assert self._target is not None
        self._entropy = entropy
        change = self.DELTA if entropy < self._target else -self.DELTA
        self._coefficient = max(0.0, self._coefficient + change)

    def save(self) -> dict[str, float | None]:
        """Return what a resumed run needs, as plain data; empty when the weight is constant."""
        if not self.is_adapted:
            return {}
        return {"coefficient": self._coefficient, "entropy": self._entropy}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `save` returned; if it is empty, begin with the settings."""
        if self.is_adapted and state:
            self._coefficient, self._entropy = state["coefficient"], state["entropy"]


class Objective:
    """Σ loss weight · w · m · (loss + entropy weight · e + kl_coefficient · k) over tokens.

    e is the entropy bonus (`sampled_negative_entropy`) and `EntropyBonus` its weight, k the
    divergence from the frozen reference.
    """

    def __init__(
        self,
        config: AlgorithmConfig,
        *,
        loss: LossFunction | None = None,
        teacher_weight: float = 0.0,
        watch: Watch | None = None,
    ) -> None:
        """Choose the parts of the objective; `loss` None: the built-in one of algorithm.loss.
        `watch` is called with the inputs and the loss of every row, before its backward pass.

        With a teacher, `teacher_weight` · (log teacher - log policy) is added to the advantage of
        each token, with the policy at the start of the update (or, with `config.ratio` "behaviour",
        the current policy). It is the policy gradient of the reverse KL divergence
        KL(policy‖teacher) of single tokens (Lu et al. 2025, "On-Policy Distillation", Thinking
        Machines Lab: a discount of 0).

        With `config.ratio` "proximal", the loss's ratio, w and m compare with the learner at the
        start of the update. With "behaviour", the ratio compares with the engine and so already is
        the importance weight; m (and w, for a loss without a ratio) uses the current learner. The
        mask of `config.opsm_threshold` always uses the current learner. With "behaviour" and a loss
        with a ratio, w is 1, and then e and k of tokens from an older policy stay uncorrected.
        """
        self._is_bypass = config.ratio is Ratio.behaviour
        self._loss, self._is_own = loss or loss_function(config), loss is not None
        self._watch = watch or (lambda _row, _inputs, _loss: None)
        self._failure = ""  # why the user's loss has failed; empty while it has not
        self._weights = off_policy.importance_weights(config)
        self._masks = off_policy.masks(config)
        self._opsm_threshold = config.opsm_threshold
        self.entropy_bonus = EntropyBonus(config)
        self._teacher_weight = teacher_weight
        self._kl_coefficient = config.kl_coefficient
        self._kl, self._is_kl_in_reward = estimator(config.kl), config.kl is Kl.k1
        self.needs_proximal = not self._is_bypass
        self.needs_reference = config.kl is not Kl.none
        self.reference_every = config.reference_every

    def of(self, row: PackedRow, logprobs: Tensor, anchor: Anchor) -> RowLoss:
        """Return the loss of a row, whose `logprobs` [N] have a gradient."""
        learner = logprobs.detach() if anchor.proximal is None else anchor.proximal
        behaviour, responses = row.behaviour_logprobs, row.responses
        advantages = anchor.advantages
        if anchor.teacher is not None:
            advantages = advantages + self._teacher_weight * (anchor.teacher - learner)
        if self._is_kl_in_reward and anchor.reference is not None:
            kl = k1_to_go(learner, anchor.reference, responses)
            advantages = advantages - self._kl_coefficient * kl
        inputs = LossInputs(
            logprobs=logprobs,
            anchor_logprobs=behaviour if self._is_bypass else learner,
            advantages=advantages,
            behaviour_logprobs=behaviour,
            responses=responses,
        )
        token_loss = self._token_loss(inputs)
        weights = self._weights(learner, behaviour, responses)
        masks = torch.ones_like(weights)
        for mask in self._masks:
            masks = masks * mask(learner, behaviour, responses)
        if self._opsm_threshold is not None:
            masks = masks * off_policy.negative_mask(inputs, threshold=self._opsm_threshold)
        values = token_loss.loss + self._penalties(logprobs, anchor.reference)
        row_loss = RowLoss(
            total=(row.loss_weights * weights * masks * values).sum(),
            clipped=token_loss.clipped,
            importance_weights=weights,
            is_masked=masks == 0,
            metrics=token_loss.metrics,
        )
        self._watch(row, inputs, row_loss)
        return row_loss

    def check(self) -> None:
        """Raise OwnFunctionError on every rank if the user's loss has failed on one of them since
        the last call. A collective; nothing happens with a built-in loss.
        """
        if not self._is_own:
            return
        failures: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(failures, self._failure)
        self._failure = ""
        if any(failures):
            raise OwnFunctionError(next(filter(None, failures)))

    def _token_loss(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of each token: NaN when the user's loss fails. Other ranks would wait
        for this one in their next collective, so it finishes the pass, and all raise in `check`.
        """
        try:
            return self._loss(inputs)
        except OwnFunctionError as error:
            self._failure = self._failure or str(error)
            nothing = torch.zeros_like(inputs.logprobs, dtype=torch.bool)
            return TokenLoss(inputs.logprobs * math.nan, nothing)

    def _penalties(self, logprobs: Tensor, reference: Tensor | None) -> Tensor | float:
        """Return the terms that are added to the loss of each token."""
        penalties: Tensor | float = 0.0
        if self.entropy_bonus.weight:
            penalties = self.entropy_bonus.weight * sampled_negative_entropy(logprobs)
        if self._kl is not None and reference is not None:
            penalties = penalties + self._kl_coefficient * self._kl(logprobs, reference)
        return penalties
