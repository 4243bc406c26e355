"""Statistics of the trained tokens, summed on the device and read once per update."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from april_rl.metrics import Histogram, Max, Mean, Metrics
from april_rl.training.algorithm.kl import k3
from april_rl.training.algorithm.ratio import ratio_of
from april_rl.training.learner.objective import RowLoss
from april_rl.training.learner.row import Anchor, PackedRow

_MEANS = (
    "loss/clip_frac",
    "loss/masked_frac",
    "loss/behaviour_kl",
    "loss/entropy",
    "loss/ratio_mean",
    "loss/is_weight_mean",
    "loss/reference_kl",
    "loss/teacher_kl",
)
# Bins of the ratio histogram: a width of 0.05 resolves a clip range, and the last bin includes all
# larger ratios.
_RATIO_BINS, _RATIO_BIN = 40, 0.05


class TokenStatistics:
    """Sums over the trained tokens of this rank: the tokens with a positive loss weight."""

    def __init__(self, *, device: torch.device) -> None:
        self._absent = {"loss/reference_kl", "loss/teacher_kl"}  # without values so far
        self._sums = torch.zeros(len(_MEANS), dtype=torch.float64, device=device)
        self._own: dict[str, Tensor] = {}  # sums of the metrics of a user's loss, by key
        self._count = torch.zeros((), dtype=torch.float64, device=device)
        self._ratio_max = torch.zeros((), device=device)  # a ratio is positive
        self._ratio_counts = torch.zeros(_RATIO_BINS, dtype=torch.float64, device=device)

    def add(
        self,
        row: PackedRow,
        anchor: Anchor,
        row_loss: RowLoss,
        *,
        logprobs: Tensor,
        entropy: Tensor,
    ) -> None:
        """Add a row's tokens; every tensor is [N].

        loss/behaviour_kl is Schulman's k3 estimator of KL(behaviour || learner), which is never
        negative and has low variance; loss/reference_kl is k3 of KL(learner || reference), and
        loss/teacher_kl of KL(learner || teacher), on the same tokens.
        """
        held, behaviour = logprobs.detach(), row.behaviour_logprobs
        ratio = ratio_of(held - behaviour)
        frozen = {"loss/reference_kl": anchor.reference, "loss/teacher_kl": anchor.teacher}
        self._absent -= {key for key, logprobs in frozen.items() if logprobs is not None}
        values = torch.stack(
            [
                row_loss.clipped,
                row_loss.is_masked,
                k3(behaviour, held),
                entropy,
                ratio,
                row_loss.importance_weights,
                *(k3(held, held if logprobs is None else logprobs) for logprobs in frozen.values()),
            ]
        )
        is_trained = row.loss_weights > 0
        self._sums += torch.where(is_trained, values, 0).sum(dim=1, dtype=torch.float64)
        for name, value in row_loss.metrics.items():
            total = torch.where(is_trained, value.detach(), 0).sum(dtype=torch.float64)
            self._own[f"loss/own/{name}"] = self._own.get(f"loss/own/{name}", 0.0) + total
        self._count += is_trained.sum()
        if len(ratio):
            largest = torch.where(is_trained, ratio, 0).max()
            self._ratio_max = torch.maximum(self._ratio_max, largest)
            bins = (ratio / _RATIO_BIN).nan_to_num().clamp(max=_RATIO_BINS - 1).long()
            self._ratio_counts.index_add_(0, bins, is_trained.to(torch.float64))

    def mean_entropy(self) -> float | None:
        """Return the mean entropy over the tokens of all ranks in nats; None if there are none. A
        collective.
        """
        sums = torch.stack([self._sums[_MEANS.index("loss/entropy")], self._count])
        dist.all_reduce(sums)
        total, count = sums.tolist()
        return total / count if count else None

    def metrics(self) -> Metrics:
        """Return loss/* of this rank, mergeable over ranks; empty when no token was trained."""
        count = self._count.item()
        if not count:
            return Metrics()
        means = {
            key: Mean(total, count)
            for key, total in zip(_MEANS, self._sums.tolist(), strict=True)
            if key not in self._absent
        }
        edges = tuple(round(_RATIO_BIN * i, 2) for i in range(_RATIO_BINS + 1))
        return Metrics(
            {
                **means,
                **{key: Mean(total.item(), count) for key, total in self._own.items()},
                "loss/ratio_max": Max(self._ratio_max.item()),
                "histogram/ratio": Histogram(edges, tuple(self._ratio_counts.tolist())),
            }
        )
