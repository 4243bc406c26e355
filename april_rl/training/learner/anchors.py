"""Log-probabilities that an update compares the policy with, computed before its first step.

Legend: [N] response tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from april_rl.training.learner.frozen_model import FrozenModel, OwnReference
from april_rl.training.learner.mismatch import Mismatch
from april_rl.training.learner.model.routers import Choices, Routers
from april_rl.training.learner.policy import Policy
from april_rl.training.learner.row import PackedRow


class Anchor(NamedTuple):
    """Values of a row that stay fixed during an update."""

    advantages: Tensor  # [N]
    proximal: Tensor | None = None  # log-probabilities [N]; None: taken from the row's own pass
    reference: Tensor | None = None  # log-probabilities [N]; None: the loss needs none
    teacher: Tensor | None = None  # log-probabilities [N]; None: there is no teacher
    choices: Choices | None = None  # experts chosen in the pass of `proximal`; None: no pass


class Anchors:
    """Computes the anchors of the rows of an update."""

    def __init__(
        self,
        policy: Policy,
        *,
        routers: Routers,
        reference: FrozenModel | OwnReference | None,
        teacher: FrozenModel | None,
        needs_proximal: bool,
        num_passes: int,
    ) -> None:
        """Use the trained `policy` and its `routers` for updates of `num_passes` passes."""
        self._policy, self._routers = policy, routers
        self._reference, self._teacher = reference, teacher
        self._needs_proximal, self._num_passes = needs_proximal, num_passes

    def of(
        self,
        rows: Sequence[Sequence[PackedRow]],
        advantages: Sequence[Sequence[Tensor]],
        mismatch: Mismatch,
    ) -> list[list[Anchor]]:
        """Return the anchor of every row of each minibatch; add log-probabilities to `mismatch`.

        The first minibatch gets its proximal log-probabilities from its own forward pass in the
        update, unless there is a second pass over the rows. A collective.
        """
        anchors = [[Anchor(each) for each in part] for part in advantages]
        first = 0 if self._num_passes > 1 else 1
        for number in range(first, len(rows)) if self._needs_proximal else ():
            anchors[number] = [
                self._with_proximal(anchor, row, mismatch)
                for anchor, row in zip(anchors[number], rows[number], strict=True)
            ]
        by_model = [_logprobs(model, rows) for model in (self._reference, self._teacher)]
        return [
            [
                anchor._replace(
                    reference=reference,
                    teacher=row.teacher_logprobs if teacher is None else teacher,
                )
                for row, anchor, reference, teacher in zip(*part, strict=True)
            ]
            for part in zip(rows, anchors, *by_model, strict=True)
        ]

    @torch.no_grad()
    def _with_proximal(self, anchor: Anchor, row: PackedRow, mismatch: Mismatch) -> Anchor:
        with self._routers.repeating(self._routers.of_engine(row.experts)):
            logprobs = self._policy(row)[0]
        mismatch.add(row, logprobs)
        return anchor._replace(proximal=logprobs, choices=self._routers.last_choices())


def _logprobs(
    model: FrozenModel | OwnReference | None, rows: Sequence[Sequence[PackedRow]]
) -> Sequence[Sequence[Tensor | None]]:
    """Return the log-probabilities of every row by a frozen model; None if there is none."""
    return [[None] * len(part) for part in rows] if model is None else model.logprobs(rows)
