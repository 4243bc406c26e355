"""Which sequence goes into which micro-batch of which rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise
from math import ceil

import numpy as np
from numpy.typing import NDArray

Bins = list[list[int]]
_Ints = NDArray[np.int64]
_FEW_BINS = 16  # with fewer, one by one is faster


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
    tokens = np.array(lengths, np.int64)
    if tokens.max(initial=0) > max_tokens:
        raise ValueError(
            f"a sequence of {tokens.max()} tokens exceeds learner.max_tokens ({max_tokens})"
        )
    longest_first = np.argsort(-tokens, kind="stable")
    tokens = tokens[longest_first]
    costs = tokens * (tokens + 6 * hidden_size)  # whole numbers: ties do not depend on rounding
    per_rank = max(1, ceil(int(tokens.sum()) / (num_ranks * max_tokens)))
    while (taken := _fill(tokens, costs, per_rank * num_ranks, max_tokens)) is None:
        per_rank += 1
    num_bins = per_rank * num_ranks
    sequences = longest_first[np.argsort(taken, kind="stable")].tolist()
    ends = np.bincount(taken, minlength=num_bins).cumsum().tolist()
    bins = [sequences[start:end] for start, end in pairwise([0, *ends])]
    bin_costs = np.bincount(taken, weights=costs, minlength=num_bins)
    bins = [bins[b] for b in np.argsort(-bin_costs, kind="stable").tolist()]
    return [bins[rank::num_ranks] for rank in range(num_ranks)]


def _fill(lengths: _Ints, costs: _Ints, num_bins: int, max_tokens: int) -> _Ints | None:
    """The bin of every sequence [S]: each, the costliest first, into the cheapest bin with room for
    it; None when no bin has.

    Many at a time while every one fits, which gives the same bins: the j-th of the next sequences
    goes into the j-th cheapest bin as long as none of those just filled is cheaper still.
    """
    steps = costs * num_bins
    keys = np.arange(num_bins)  # cost · num_bins + bin, sorted: the cheapest bin, then the first
    room = np.full(num_bins, max_tokens)
    taken = np.empty(len(lengths), np.int64)
    start = 0
    while start < len(lengths) and num_bins >= _FEW_BINS:
        filled = keys[: len(lengths) - start] + steps[start : start + num_bins]
        bins = keys[: len(filled)] % num_bins
        is_next = room[bins] >= lengths[start : start + num_bins]
        is_next[1:] &= keys[1 : len(filled)] < np.minimum.accumulate(filled)[:-1]
        num_next = len(filled) if is_next.all() else int(is_next.argmin())
        if num_next == 0:
            break
        end = start + num_next
        taken[start:end] = bins[:num_next]
        room[bins[:num_next]] -= lengths[start:end]
        keys[:num_next] = filled[:num_next]
        keys.sort()
        start = end
    rest = _one_by_one(
        lengths[start:].tolist(), steps[start:].tolist(), keys.tolist(), room.tolist()
    )
    if rest is None:
        return None
    taken[start:] = rest
    return taken


def _one_by_one(
    lengths: list[int], steps: list[int], keys: list[int], room: list[int]
) -> list[int] | None:
    """The bins of the sequences that are left, by a heap of the keys; changes `keys` and `room`."""
    num_bins, taken = len(keys), []
    full: list[tuple[int, int]] = []  # -room, key: without room for the last sequence
    for length, step in zip(lengths, steps, strict=True):
        while full and -full[0][0] >= length:  # they get shorter, so that it may fit again
            heapq.heappush(keys, heapq.heappop(full)[1])
        while keys and (left := room[keys[0] % num_bins]) < length:
            heapq.heappush(full, (-left, heapq.heappop(keys)))
        if not keys:
            return None
        b = keys[0] % num_bins
        taken.append(b)
        room[b] -= length
        heapq.heapreplace(keys, keys[0] + step)
    return taken
