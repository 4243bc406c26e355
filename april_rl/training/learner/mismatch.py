"""Mismatch: the difference between engine and learner on tokens sampled with the same weights."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from april_rl.metrics import Max, Mean, Metrics
from april_rl.training.learner.row import PackedRow
from april_rl.training.learner.update_errors import END_FACTOR, MEAN, MismatchError

DEPTHS = (256, 1024, 4096, 16_384, 65_536, 1 << 20)  # tokens of the context up to a token


class Mismatch:
    """Sums of |logprobs - behaviour_logprobs| by depth in the context, added row by row.

    Counts only tokens that were sampled with the learner's current weights and a KV cache computed
    with them.
    """

    def __init__(self, *, device: torch.device) -> None:
        self._sums = torch.zeros(len(DEPTHS), 2, dtype=torch.float64, device=device)  # Σ, tokens
        self._largest = torch.zeros((), device=device)

    def add(self, row: PackedRow, logprobs: Tensor) -> None:
        """Compare a row's log-probabilities [N], computed before the first optimizer step."""
        distances = (logprobs.detach() - row.behaviour_logprobs).abs()[row.is_comparable]
        if distances.numel():
            depths = row.position_ids[0, row.positions][row.is_comparable] + 1
            place = torch.bucketize(depths.clamp_max(DEPTHS[-1]), depths.new_tensor(DEPTHS))
            counted = torch.stack([distances.double(), torch.ones_like(distances.double())], dim=1)
            self._sums.index_add_(0, place, counted)
            self._largest = torch.maximum(self._largest, distances.max())

    def check(self, max_mismatch: float, *, model_type: str, has_synced: bool) -> None:
        """Raise MismatchError when the mean is NaN or above END_FACTOR · `max_mismatch` nats.

        The mean is over all ranks. A collective; passes when no rank has a token to compare. The
        error names the most likely cause first: `has_synced` says whether the engine got its
        weights from the learner or, like the learner, from model.path.
        """
        sums, largest = self._sums.sum(0), self._largest.clone()
        dist.all_reduce(sums)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        total, count = sums.tolist()
        mean = total / count if count else 0.0
        if mean <= END_FACTOR * max_mismatch:
            return
        raise MismatchError(
            f"engine and learner disagree by {mean:.4g} nats on average (largest "
            f"{largest.item():.4g}, over {count:.0f} tokens) about tokens sampled with the "
            f"learner's current weights; the limit is {END_FACTOR:g} times learner.max_mismatch="
            f"{max_mismatch:g}. About 0.01 is rounding; NaN means that one side computes NaN. "
            f"{_causes(model_type, has_synced=has_synced)} Raise learner.max_mismatch only if the "
            "difference comes from precision"
        )

    def metrics(self) -> Metrics:
        """Return mismatch/* of this rank; empty when there was no token to compare."""
        total, count = self._sums.sum(0).tolist()
        if not count:
            return Metrics()
        by_depth = zip(DEPTHS, self._sums.tolist(), strict=True)
        return Metrics(
            {
                MEAN: Mean(total, count),
                "mismatch/logprob_abs_max": Max(self._largest.item()),
                **{f"mismatch/to_{d}_tokens": Mean(*sums) for d, sums in by_depth if sums[1]},
            }
        )


def _causes(model_type: str, *, has_synced: bool) -> str:
    """Return what to check, the most likely cause first."""
    model = (
        f"that both compute the model in the same way (model_type {model_type} in docs/models.md; "
        "engine.dtype and engine.kv_cache_dtype against learner.compute_dtype)"
    )
    sampling = (
        "that the engine samples at rollout.temperature without top-p, top-k or penalties, and "
        "reports log-probabilities at that temperature"
    )
    sync = "the weight sync (the engine must get every weight, also a tied lm_head)"
    if has_synced:
        return (
            f"The engine got these weights by a weight sync. Check first {sync}, then {model}, "
            f"then {sampling}."
        )
    return (
        "Both loaded their weights from model.path, so the weight sync is not the cause. Check "
        f"first {model}, then {sampling}."
    )
