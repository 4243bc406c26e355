"""The plan of micro-batches against the greedy rule as it is told: a search through all bins."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from april_rl.batch.plan import Bins, plan_micro_batches

BUDGET, HIDDEN_SIZE = 64, 8


def cost(length: int) -> float:
    return length + length * length / (6 * HIDDEN_SIZE)


def fill(lengths: Sequence[int], num_bins: int) -> Bins | None:
    """Each sequence, the longest first, into the cheapest of the bins that have room for it."""
    bins: Bins = [[] for _ in range(num_bins)]
    costs, room = [0.0] * num_bins, [BUDGET] * num_bins
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [b for b in range(num_bins) if room[b] >= lengths[i]]
        if not fitting:
            return None
        cheapest = min(fitting, key=lambda b: (costs[b], b))
        bins[cheapest].append(i)
        costs[cheapest] += cost(lengths[i])
        room[cheapest] -= lengths[i]
    return bins


@given(st.lists(st.integers(1, BUDGET), min_size=1, max_size=60), st.integers(1, 4))
def test_the_plan_is_that_of_a_search_through_all_bins(lengths, num_ranks):
    """Fails when a bin that was too full for one sequence is not asked again for a shorter one, or
    a bin with too little room is taken for its cost.
    """
    num_bins = num_ranks * max(1, ceil(sum(lengths) / (num_ranks * BUDGET)))
    while (bins := fill(lengths, num_bins)) is None:
        num_bins += num_ranks
    bins.sort(key=lambda bin_: -sum(cost(lengths[i]) for i in bin_))
    found = plan_micro_batches(
        lengths, num_ranks=num_ranks, max_tokens=BUDGET, hidden_size=HIDDEN_SIZE
    )
    assert found == [bins[rank::num_ranks] for rank in range(num_ranks)]
