"""A micro-batch as tensors on the learner's device, reduced to what the loss needs.

Legend: [T] tokens of the packed row, [N] response tokens in it. Everything a loss needs is [N]: the
output layer never sees a prompt position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from april_rl.training.algorithm.responses import Responses
from april_rl.training.batch.packing import MicroBatch
from april_rl.training.learner.model.attention import Packing
from april_rl.training.learner.model.routers import Choices


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """One packed row and the values of each of its response tokens."""

    packing: Packing
    token_ids: Tensor  # [1, T]
    position_ids: Tensor  # [1, T]
    responses: Responses  # how the N tokens divide into responses
    positions: Tensor  # [N], positions in the row that predict a response token
    labels: Tensor  # [N], the response tokens
    behaviour_logprobs: Tensor  # [N], nats
    credits: Tensor  # [N], what a token is paid: its advantage, or its reward for a critic
    ages: Tensor  # [N], policy versions between sampling and this update
    is_comparable: Tensor  # [N], bool: engine and learner should agree on this token
    loss_weights: Tensor  # [N]
    teacher_logprobs: Tensor | None  # [N], nats, of a teacher on a server; None: there is none
    # Experts that the engine chose, [T, layers, experts of a token], on the host; -1: not known.
    # None: the engine reported no experts.
    experts: Tensor | None

    @classmethod
    def of(cls, micro_batch: MicroBatch, *, device: torch.device) -> PackedRow:
        """Return the row of a micro-batch; its response mask selects the positions."""
        positions = np.flatnonzero(micro_batch.response_mask)

        def select(values: NDArray[Any]) -> Tensor:
            return torch.from_numpy(values[positions]).to(device)

        teacher = micro_batch.teacher_logprobs
        return cls(
            packing=Packing.of(micro_batch.lengths, device=device),
            token_ids=torch.tensor(micro_batch.token_ids, device=device)[None],
            position_ids=torch.tensor(micro_batch.position_ids, device=device)[None],
            responses=Responses.of(micro_batch.response_lengths, device=device),
            positions=torch.from_numpy(positions).to(device),
            labels=select(micro_batch.labels),
            behaviour_logprobs=select(micro_batch.behaviour_logprobs),
            credits=select(micro_batch.credits),
            ages=select(micro_batch.ages),
            is_comparable=select(micro_batch.is_comparable),
            loss_weights=select(micro_batch.loss_weights),
            teacher_logprobs=None if teacher is None else select(teacher),
            experts=_experts(micro_batch),
        )


class Anchor(NamedTuple):
    """Values of a row that stay fixed during an update."""

    advantages: Tensor  # [N]
    proximal: Tensor | None = None  # log-probabilities [N]; None: taken from the row's own pass
    reference: Tensor | None = None  # log-probabilities [N]; None: the loss needs none
    teacher: Tensor | None = None  # log-probabilities [N]; None: there is no teacher
    choices: Choices | None = None  # experts chosen in the pass of `proximal`; None: no pass


def _experts(micro_batch: MicroBatch) -> Tensor | None:
    experts, is_routed = micro_batch.experts, micro_batch.is_routed
    if experts is None or is_routed is None:
        return None
    return torch.from_numpy(np.where(is_routed[:, None, None], experts.astype(np.int16), -1))
