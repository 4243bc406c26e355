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
    if lengths and max(lengths) > max_tokens:
        raise ValueError(
            f"a sequence of {max(lengths)} tokens exceeds learner.max_tokens ({max_tokens})"
        )
    per_rank = max(1, ceil(sum(lengths) / (num_ranks * max_tokens)))
    costs = [length + length * length / (6 * hidden_size) for length in lengths]
    while (bins := _fill(lengths, costs, per_rank * num_ranks, max_tokens)) is None:
        per_rank += 1
    bins.sort(key=lambda bin_: -sum(costs[i] for i in bin_))
    return [bins[rank::num_ranks] for rank in range(num_ranks)]


def _fill(
    lengths: Sequence[int], costs: Sequence[float], num_bins: int, max_tokens: int
) -> Bins | None:
    """Every sequence into the cheapest bin, the costliest first; None when one does not fit its
    bin.
    """
    bins: Bins = [[] for _ in range(num_bins)]
    heap = [(0.0, b, max_tokens) for b in range(num_bins)]  # cost, bin, room
    full: list[tuple[int, float, int]] = []  # -room, cost, bin: without room for the last sequence
    for i in sorted(range(len(lengths)), key=costs.__getitem__, reverse=True):
        length = lengths[i]
        while full and -full[0][0] >= length:  # they get shorter, so that it may fit again
            room, cost, b = heapq.heappop(full)
            heapq.heappush(heap, (cost, b, -room))
        while heap and heap[0][2] < length:
            cost, b, room = heapq.heappop(heap)
            heapq.heappush(full, (-room, cost, b))
        if not heap:
            return None
        cost, b, room = heap[0]
        bins[b].append(i)
        heapq.heapreplace(heap, (cost + costs[i], b, room - length))
    return bins
