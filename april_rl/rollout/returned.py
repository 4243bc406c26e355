"""What engines give back, in columns: which of it was awaited, and what it amounts to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from april_rl.rollout.sample_table import SampleTable, rank_within, view
from april_rl.ticks import Completions
from april_rl.types import Completion


class Returned(NamedTuple):
    """Completions of requests that were awaited, one of a sample at most [n]."""

    completions: Sequence[Completion]
    prompt_ids: NDArray[np.int64]
    indices: NDArray[np.int64]  # of the samples in their groups
    rows: NDArray[np.int64]  # of the samples in the table
    homes: NDArray[np.intc]  # engine each comes from
    work: NDArray[np.float64]  # tokens that engine had to compute
    starts: NDArray[np.int64]  # response tokens the sample had before
    num_tokens: NDArray[np.int64]
    context_versions: NDArray[np.int64]  # the oldest policy whose cache they were sampled on
    is_finished: NDArray[np.bool_]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Response tokens of each sample, with what came [n]."""
        return self.starts + self.num_tokens

    @property
    def with_slot(self) -> Returned:
        """Those whose request had a slot: the others brought nothing."""
        return self.where(self.is_finished | (self.num_tokens > 0))

    def where(self, chosen: NDArray[np.bool_]) -> Returned:
        """Of these the `chosen` ones, by a mask [n]."""
        if chosen.all():
            return self
        which = np.flatnonzero(chosen)
        return Returned(
            completions=[self.completions[number] for number in which.tolist()],
            prompt_ids=self.prompt_ids[which],
            indices=self.indices[which],
            rows=self.rows[which],
            homes=self.homes[which],
            work=self.work[which],
            starts=self.starts[which],
            num_tokens=self.num_tokens[which],
            context_versions=self.context_versions[which],
            is_finished=self.is_finished[which],
        )


def awaited(
    completions: Completions,
    rows: NDArray[np.int64],
    table: SampleTable,
    *,
    policy_version: int,
    engines: NDArray[np.integer[Any]] | None = None,
) -> Returned:
    """What of these is the answer to a request that is out, with the `rows` of their samples (below
    0: of none) [n].

    The others came late and are passed over: of a version before `policy_version`, to be put where
    the sample no longer ends, a second time, or from another of `engines` [n] than the one that has
    the sample (any may have it when None).
    """
    came = completions.columns
    homes, work = view(table.homes)[rows], view(table.work)[rows]
    is_due = (rows >= 0) & (work > 0.0) & (came.policy_version >= policy_version)
    is_due &= came.start == view(table.lengths)[rows]
    if engines is not None:
        is_due &= homes == engines
    returned = Returned(
        completions=completions,
        prompt_ids=came.prompt_id,
        indices=came.index,
        rows=rows,
        homes=homes,
        work=work,
        starts=came.start,
        num_tokens=came.num_tokens,
        context_versions=came.context_version,
        is_finished=came.is_finished,
    )
    returned = returned.where(is_due)
    return returned.where(rank_within(returned.rows) == 0)
