"""Which sequence goes into which micro-batch of which rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import ceil

Bins = list[list[int]]


def plan_micro_batches(
    lengths: Sequence[int], *, num_ranks: int, max_tokens: int, hidden_size: int
) -> list[Bins]:
    """plan[rank][k]: indices of the sequences of micro-batch k; every rank has equally many, some
    may be empty.

    Longest processing time first (Graham 1969) on the cost of a transformer layer, l +
    l²/(6·hidden_size), under a budget of `max_tokens` a bin; the number of bins is the smallest a
    rank needs for which that fits. Bins are dealt in the order of their cost, so that micro-batch k
    costs about the same on every rank. A sequence longer than the budget is a ValueError:
    configuration rules it out.
    """
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ValueError(
            f"a sequence of {longest} tokens exceeds learner.max_tokens ({max_tokens})"
        )
    costs = [length * (length + 6 * hidden_size) for length in lengths]  # whole: no rounding
    per_rank = max(1, ceil(sum(lengths) / (num_ranks * max_tokens)))
    while (bins := _fill(lengths, costs, per_rank * num_ranks, max_tokens)) is None:
        per_rank += 1
    bins.sort(key=lambda sequences: -sum(costs[i] for i in sequences))
    return [bins[rank::num_ranks] for rank in range(num_ranks)]


def _fill(
    lengths: Sequence[int], costs: Sequence[int], num_bins: int, max_tokens: int
) -> Bins | None:
    """Put every sequence, the longest first, into the cheapest bin with room for it; None when no
    bin has.
    """
    bins: Bins = [[] for _ in range(num_bins)]
    room = [max_tokens] * num_bins
    cheapest = [(0, number) for number in range(num_bins)]  # heap: cost and number of each bin
    full: list[tuple[int, int, int]] = []  # heap: -room, cost, number of bins without room
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        while full and -full[0][0] >= lengths[i]:  # sequences get shorter: it may fit again
            _, cost, number = heapq.heappop(full)
            heapq.heappush(cheapest, (cost, number))
        while cheapest and room[cheapest[0][1]] < lengths[i]:
            cost, number = heapq.heappop(cheapest)
            heapq.heappush(full, (-room[number], cost, number))
        if not cheapest:
            return None
        cost, number = cheapest[0]
        bins[number].append(i)
        room[number] -= lengths[i]
        heapq.heapreplace(cheapest, (cost + costs[i], number))
    return bins
