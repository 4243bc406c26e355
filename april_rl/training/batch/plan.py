"""Decide which sequence goes into which micro-batch of which rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import ceil

Bins = list[list[int]]


def plan_micro_batches(
    lengths: Sequence[int], *, num_ranks: int, max_tokens: int, hidden_size: int
) -> list[Bins]:
    """Return plan[rank][k], the indices of the sequences in micro-batch k; all ranks have the same
    number of micro-batches, some possibly empty.

    The method is longest processing time first (Graham 1969) on the cost of a transformer layer, l
    + l²/(6·hidden_size), under a budget of `max_tokens` a bin, with the smallest number of bins a
    rank for which that fits. Bins are dealt to ranks in the order of their cost, so that
    micro-batch k costs about the same on every rank. A sequence longer than the budget raises
    ValueError; configuration checks rule it out.
    """
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ValueError(f"a sequence of {longest} tokens exceeds learner.max_tokens={max_tokens}")
    # Integers, so that sums have no rounding error.
    costs = [length * (length + 6 * hidden_size) for length in lengths]
    per_rank = max(1, ceil(sum(lengths) / (num_ranks * max_tokens)))
    while (bins := _fill(lengths, costs, per_rank * num_ranks, max_tokens)) is None:
        per_rank += 1
    bins.sort(key=lambda sequences: -sum(costs[i] for i in sequences))
    return [bins[rank::num_ranks] for rank in range(num_ranks)]


def _fill(
    lengths: Sequence[int], costs: Sequence[int], num_bins: int, max_tokens: int
) -> Bins | None:
    """Put every sequence, longest first, into the cheapest bin with room for it; return None if
    one fits no bin.
    """
    bins: Bins = [[] for _ in range(num_bins)]
    room = [max_tokens] * num_bins
    cheapest = [(0, number) for number in range(num_bins)]  # heap of (cost, number) of each bin
    full: list[tuple[int, int, int]] = []  # heap of (-room, cost, number) of bins without room
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        while full and -full[0][0] >= lengths[i]:  # sequences get shorter, so one may fit again
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
