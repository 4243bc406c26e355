"""Turn scored groups into packed rows without padding, with a loss weight for every token of all
ranks.

Legend: [T] positions of a packed row, [R] response tokens of a sample. Rows are aligned to the
*predicting* position: position t carries what belongs to the token at t + 1 of the same
sequence, so a sequence of P + R tokens has its response at positions P - 1 … P + R - 2 and
nothing at its last one. The words of an environment between the turns are in the sequence, but
in no mask. A sample with several contexts becomes several consecutive sequences, but is one
response. `experts` alone belongs to the token at t itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from april_rl.metrics import Mean, Metrics, Sum
from april_rl.training.batch.plan import plan_micro_batches
from april_rl.training.batch.staleness import (
    comparable,
    num_versions,
    sample_ages,
    staleness_by_length,
    staleness_metrics,
)
from april_rl.types import Completion, Sample, SampleId, ScoredGroup

# The dummy row of a rank that has no samples left: all ranks make the same number of passes.
_DUMMY_TOKENS = 2

TOKEN_BYTES = 42  # a token in a micro-batch: ids, mask, ages, log-probability, weights

Floats32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One packed row: the input of one forward and backward pass."""

    lengths: tuple[int, ...]  # tokens of each sequence; Σ lengths = T
    response_lengths: tuple[int, ...]  # response tokens of each sample, of one or more sequences
    token_ids: NDArray[np.int64]  # [T]
    position_ids: NDArray[np.int64]  # [T], from 0 within each sequence
    labels: NDArray[np.int64]  # [T], the next token; 0 where there is no response token to predict
    response_mask: NDArray[np.bool_]  # [T], whether this position predicts a response token
    behaviour_logprobs: NDArray[np.float32]  # [T], nats
    credits: NDArray[np.float32]  # [T], a token's advantage, or with a critic its reward
    ages: NDArray[np.int32]  # [T], policy versions between sampling and this update; 0 elsewhere
    is_comparable: NDArray[np.bool_]  # [T], whether age is 0 and the KV cache is of this version
    loss_weights: NDArray[np.float32]  # [T], weight of a token in the loss of its minibatch
    # [T], nats, from a teacher on a server; None if there is none
    teacher_logprobs: NDArray[np.float32] | None = None
    experts: NDArray[np.uint8 | np.uint16] | None = None  # [T, layers, experts of a token]
    is_routed: NDArray[np.bool_] | None = None  # [T], whether `experts` knows this token


# minibatches[m][rank][k] is micro-batch k of a rank in optimizer step m.
MiniBatches = tuple[tuple[tuple[MicroBatch, ...], ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A step's training data, planned for every rank."""

    minibatches: MiniBatches
    metrics: Metrics  # staleness/*, loss/age_weight_mean

    def of_rank(self, rank: int) -> tuple[tuple[MicroBatch, ...], ...]:
        """Return the micro-batches of one rank as [minibatch][micro-batch]."""
        return tuple(minibatch[rank] for minibatch in self.minibatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A sample before it is packed."""

    sample: Sample
    credit: float | NDArray[np.float64]  # of the sample, or of each response token [R]
    ages: NDArray[np.int32]  # [R]
    comparable: NDArray[np.bool_]  # [R]
    age_weights: Floats32  # [R], 0 above the staleness cap
    teacher_logprobs: Floats32 | None = None  # [R]

    @property
    def num_tokens(self) -> int:
        return len(self.sample.prompt.token_ids) + self.sample.end


class _Weighed(NamedTuple):
    """A sample with the loss weight of each token."""

    row: _Row
    loss_weights: Floats32  # [R]


class Packer:
    """Plans micro-batches for all ranks and fills them with samples."""

    def __init__(
        self,
        *,
        num_ranks: int,
        max_tokens: int,
        num_minibatches: int,
        max_staleness: int,
        max_response_tokens: int,
        age_weights: Callable[[NDArray[np.int32]], Floats32],
        aggregation: Callable[[Sequence[Floats32]], list[Floats32]],
        hidden_size: int,
        mask_truncated: bool = False,
    ) -> None:
        """Store the settings.

        `max_tokens` is the budget of one row; `hidden_size` weighs attention against the rest of a
        layer; `max_response_tokens` is the full scale of the metrics' length buckets. `age_weights`
        maps ages [R] up to `max_staleness` to the weight of each token. `aggregation` maps these
        weights (0 for a masked token) of all trained responses of a minibatch, on all ranks, to
        loss weights [R]. With `mask_truncated` all tokens of a response that reached its budget
        have the weight 0: DAPO's overlong filtering (Yu et al. 2025, section 3.4). They leave the
        denominator too; their reward stays in the advantages of their group.
        """
        self._num_ranks, self._max_tokens = num_ranks, max_tokens
        self._num_minibatches = num_minibatches
        self._max_staleness, self._age_weights = max_staleness, age_weights
        self._aggregation, self._mask_truncated = aggregation, mask_truncated
        self._hidden_size, self._max_response_tokens = hidden_size, max_response_tokens

    def pack(
        self,
        groups: Sequence[ScoredGroup],
        credits: Sequence[Sequence[float | NDArray[np.float64]]],
        *,
        policy_version: int,
        probes: Sequence[Sample] = (),
        teacher_logprobs: Mapping[SampleId, Floats32] | None = None,
    ) -> Batch:
        """Return the batch that advances the policy from `policy_version`.

        `credits[i]` is [G] for `groups[i]`: what a sample is paid, or each of its tokens [R]: its
        advantage, or with a critic its reward. `probes` are samples that are not trained now but
        have comparable tokens: when no trained token is comparable, they are packed with loss
        weight 0, so that engine and learner are compared at every version that has sampled
        anything. A token whose age is above the cap has loss weight 0. `teacher_logprobs` has [R]
        of each sample, from a teacher on a server.
        """
        of_teacher = teacher_logprobs or {}
        num_minibatches = min(self._num_minibatches, len(groups))
        # Deal groups out in turn: they are sorted by age, and in a minibatch of equal ages the
        # age weights would cancel against the denominator.
        chunks = [range(len(groups))[first::num_minibatches] for first in range(num_minibatches)]
        rows = [
            [
                self._row(
                    sample, credit, policy_version, teacher_logprobs=of_teacher.get(sample.id)
                )
                for i in chunk
                for sample, credit in zip(groups[i].group.samples, credits[i], strict=True)
            ]
            for chunk in chunks
        ]
        weighed = [self._weigh(chunk) for chunk in rows]
        # The first minibatch is always compared before an optimizer step is made.
        if not any(row.comparable.any() for row in rows[0]):
            for row in (self._row(sample, 0.0, policy_version) for sample in probes):
                weighed[0].append(_Weighed(row, np.zeros_like(row.age_weights)))
        return Batch(
            minibatches=tuple(self._minibatch(chunk) for chunk in weighed),
            metrics=self._metrics([row for chunk in rows for row in chunk]),
        )

    def _metrics(self, rows: Sequence[_Row]) -> Metrics:
        """Return `staleness/*`, the mean age weight and the number of tokens of trained samples."""
        ages = np.concatenate([row.ages for row in rows])
        is_fresh = np.concatenate([row.comparable for row in rows])
        weights = np.concatenate([row.age_weights for row in rows])
        lengths = np.asarray([len(row.ages) for row in rows])
        cap, budget = self._max_staleness, self._max_response_tokens
        return Metrics(
            {
                **staleness_metrics(ages, is_fresh, weights, max_staleness=cap),
                **staleness_by_length(ages, lengths, max_response_tokens=budget),
                "staleness/versions_mean": Mean(
                    float(sum(num_versions(row.sample) for row in rows)), float(len(rows))
                ),
                "throughput/trained_tokens": Sum(len(ages)),
            }
        )

    def _row(
        self,
        sample: Sample,
        credit: float | NDArray[np.float64],
        policy_version: int,
        teacher_logprobs: Floats32 | None = None,
    ) -> _Row:
        ages = sample_ages(sample, policy_version=policy_version)
        age_weights = self._age_weights(np.minimum(ages, self._max_staleness))
        return _Row(
            sample=sample,
            credit=credit,
            ages=ages,
            comparable=comparable(sample, policy_version=policy_version),
            age_weights=np.where(ages > self._max_staleness, np.float32(0), age_weights),
            teacher_logprobs=teacher_logprobs,
        )

    def _weigh(self, rows: Sequence[_Row]) -> list[_Weighed]:
        """Return the trained rows of a minibatch with their loss weights."""
        loss_weights = self._aggregation([self._token_weights(row) for row in rows])
        return [_Weighed(row, weights) for row, weights in zip(rows, loss_weights, strict=True)]

    def _token_weights(self, row: _Row) -> Floats32:
        is_masked = self._mask_truncated and row.sample.finish_reason == "length"
        return np.zeros_like(row.age_weights) if is_masked else row.age_weights

    def _minibatch(self, weighed: Sequence[_Weighed]) -> tuple[tuple[MicroBatch, ...], ...]:
        plan = plan_micro_batches(
            [row.num_tokens for row, _ in weighed],
            num_ranks=self._num_ranks,
            max_tokens=self._max_tokens,
            hidden_size=self._hidden_size,
        )
        return tuple(tuple(pack_row([weighed[i] for i in bin_]) for bin_ in rank) for rank in plan)


def pack_row(weighed: Sequence[_Weighed]) -> MicroBatch:
    """Concatenate the samples of `weighed` into one row; without samples, return a row of two
    tokens with loss weight 0.
    """
    of_samples = (row.sample.context_lengths for row, _ in weighed)
    lengths = tuple(chain.from_iterable(of_samples)) or (_DUMMY_TOKENS,)
    size = sum(lengths)
    token_ids, labels = np.zeros(size, np.int64), np.zeros(size, np.int64)
    mask, is_comparable = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
    ages = np.zeros(size, np.int32)
    logprobs, credits, weights, teacher = (np.zeros(size, np.float32) for _ in range(4))
    has_teacher = any(row.teacher_logprobs is not None for row, _ in weighed)
    start = 0
    for row, loss_weights in weighed:
        end = start + row.num_tokens
        token_ids[start:end] = row.sample.sequence
        predicting = start - 1 + np.flatnonzero(np.frombuffer(row.sample.is_sampled, np.uint8))
        labels[predicting] = row.sample.token_ids
        mask[predicting] = True
        ages[predicting] = row.ages
        is_comparable[predicting] = row.comparable
        logprobs[predicting] = row.sample.behaviour_logprobs
        credits[predicting] = row.credit
        if row.teacher_logprobs is not None:
            teacher[predicting] = row.teacher_logprobs
        weights[predicting] = loss_weights
        start = end
    return MicroBatch(
        lengths=lengths,
        response_lengths=tuple(len(row.ages) for row, _ in weighed) or (0,),
        token_ids=token_ids,
        position_ids=np.concatenate([np.arange(n, dtype=np.int64) for n in lengths]),
        labels=labels,
        response_mask=mask,
        behaviour_logprobs=logprobs,
        credits=credits,
        ages=ages,
        is_comparable=is_comparable,
        loss_weights=weights,
        teacher_logprobs=teacher if has_teacher else None,
        **_experts([row.sample for row, _ in weighed], size),
    )


def _experts(samples: Sequence[Sample], size: int) -> dict[str, NDArray[Any]]:
    """Return the fields `experts` and `is_routed` of a row of `size` tokens; return neither when
    no engine has reported experts.
    """
    first = next((c.experts for s in samples for c in s.completions if c.experts), None)
    if first is None:
        return {}
    shape = size, first.num_layers, first.num_chosen
    experts, is_routed = np.zeros(shape, first.numbers.typecode), np.zeros(size, np.bool_)
    end = 0
    for sample in samples:
        end += len(sample.prompt.token_ids)
        for span in sample.spans:
            end += len(span.token_ids)
            if isinstance(span, Completion) and span.experts is not None:
                tokens = slice(end - 1 - span.experts.num_tokens, end - 1)
                experts[tokens] = np.asarray(span.experts.numbers).reshape(-1, *shape[1:])
                is_routed[tokens] = True
    return {"experts": experts, "is_routed": is_routed}
