"""Mismatch: how far engine and learner are apart on tokens that the very same weights sampled."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from april_rl.errors import RunError
from april_rl.learner.row import PackedRow
from april_rl.metrics import Max, Mean, Metrics

# A mean above learner.max_mismatch is worth a warning: how far two correct sides are apart depends
# on kernels and precision. Above this many times it, they do not compute the same.
END_FACTOR = 5.0
MEAN = "mismatch/logprob_abs_mean"


class MismatchError(RunError):
    """Engine and learner disagree about the log-probabilities of the same weights."""


class MismatchWarning:
    """What a run says when engine and learner drift apart, once until they agree again."""

    def __init__(self, max_mismatch: float) -> None:
        """`max_mismatch` is in nats."""
        self._max_mismatch, self._is_above = max_mismatch, False

    def of(self, metrics: Metrics) -> str | None:
        """Return the warning that the merged metrics of a step call for, if any."""
        if MEAN not in metrics:
            return None
        mean = metrics.number(MEAN)
        was_above, self._is_above = self._is_above, mean > self._max_mismatch
        if was_above or not self._is_above:
            return None
        return (
            f"warning: engine and learner disagree by {mean:.3g} nats on average about tokens of "
            f"the same weights, more than learner.max_mismatch={self._max_mismatch:g}; at "
            f"{END_FACTOR:g} times it, {END_FACTOR * self._max_mismatch:g}, the step is "
            "skipped and the weights are synced again"
        )


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

    def check(self, max_mismatch: float, *, model_type: str, has_synced: bool) -> None:
        """Raise MismatchError when the mean over all ranks is above END_FACTOR · `max_mismatch`
        nats or NaN; what is named first is the likeliest cause.

        A collective. Without such a token on any rank there is nothing to compare. `has_synced`:
        whether the engine has its weights from the learner, not from the folder of both.
        """
        sums, largest = self._sums.clone(), self._largest.clone()
        dist.all_reduce(sums)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        total, count = sums.tolist()
        mean = total / count if count else 0.0
        if mean <= END_FACTOR * max_mismatch:
            return
        raise MismatchError(
            f"engine and learner disagree by {mean:.4g} nats on average (largest "
            f"{largest.item():.4g}, over {count:.0f} tokens) about tokens sampled with the weights "
            f"the learner has now; the limit is {END_FACTOR:g} times learner.max_mismatch = "
            f"{max_mismatch:g}. About 0.01 is rounding, NaN means that one of "
            f"them has no numbers. {_causes(model_type, has_synced=has_synced)} Raise the limit "
            "only when the difference is precision"
        )

    def metrics(self) -> Metrics:
        """mismatch/* of this rank; empty without a token to compare."""
        total, count = self._sums.tolist()
        if not count:
            return Metrics()
        return Metrics(
            {
                MEAN: Mean(total, count),
                "mismatch/logprob_abs_max": Max(self._largest.item()),
            }
        )


def _causes(model_type: str, *, has_synced: bool) -> str:
    """What to look at, the likeliest first."""
    model = (
        f"that both compute the model alike (model_type {model_type} in docs/models.md; "
        "engine.dtype and kv_cache_dtype against learner.compute_dtype)"
    )
    sampling = (
        "that the engine samples at rollout.temperature without top-p, top-k or penalties and "
        "reports log-probabilities after temperature"
    )
    sync = "the weight sync (that the engine got every weight, a tied lm_head too)"
    if has_synced:
        return f"A step before this one agreed. Check first {sync}, then {model}, then {sampling}."
    return (
        "Both have their weights from model.path, so the weight sync has no part in it. Check "
        f"first {model}, then {sampling}."
    )
