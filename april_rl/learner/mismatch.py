"""Mismatch: how far engine and learner are apart on tokens that the very same weights sampled."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from april_rl.errors import RunError
from april_rl.learner.row import PackedRow
from april_rl.metrics import Max, Mean, Metrics


class MismatchError(RunError):
    """Engine and learner disagree about the log-probabilities of the same weights."""


class Mismatch:
    """|logprobs - behaviour_logprobs| over the tokens that the very weights of the learner sampled,
    on a KV cache of theirs, summed up row by row.
    """

    def __init__(self, *, device: torch.device) -> None:
        """Nothing compared yet."""
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)  # Σ, number of tokens
        self._largest = torch.zeros((), device=device)

    def add(self, row: PackedRow, logprobs: Tensor) -> None:
        """Compare a row's log-probabilities [N], computed before the first optimizer step."""
        distances = (logprobs.detach() - row.behaviour_logprobs).abs()[row.is_comparable]
        if distances.numel():
            total = distances.sum(dtype=torch.float64)
            self._sums += torch.stack([total, total.new_tensor(distances.numel())])
            self._largest = torch.maximum(self._largest, distances.max())

    def check(self, max_mismatch: float) -> None:
        """Raise MismatchError when the mean over all ranks is above `max_mismatch` nats or NaN.

        A collective. Without such a token on any rank there is nothing to compare.
        """
        sums, largest = self._sums.clone(), self._largest.clone()
        dist.all_reduce(sums)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        total, count = sums.tolist()
        mean = total / count if count else 0.0
        if mean <= max_mismatch:
            return
        raise MismatchError(
            f"engine and learner disagree by {mean:.4g} nats on average (largest "
            f"{largest.item():.4g}, over {count:.0f} tokens) about tokens sampled with the weights "
            f"the learner has now; the limit is learner.max_mismatch = {max_mismatch:g}. No step "
            "was made. About 0.01 is rounding; more means that the weight sync is broken or that "
            "the two sides sample and compute differently, NaN that one of them has no numbers. "
            "Check that the engine got every weight (a tied lm_head too), that it samples at "
            "rollout.temperature without top-p, top-k or penalties and reports log-probabilities "
            "after temperature, and that engine.dtype and learner.compute_dtype agree; raise the "
            "limit only when the difference is precision"
        )

    def metrics(self) -> Metrics:
        """mismatch/* of this rank; empty without a token to compare."""
        total, count = self._sums.tolist()
        if not count:
            return Metrics()
        return Metrics(
            {
                "mismatch/logprob_abs_mean": Mean(total, count),
                "mismatch/logprob_abs_max": Max(self._largest.item()),
            }
        )
