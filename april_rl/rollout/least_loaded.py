"""Which of many has the least load, without looking at all of them."""

from __future__ import annotations

import heapq

# Outdated entries are removed when they outnumber the members by so much.
_MAX_OUTDATED = 4

Load = tuple[bool, float]  # the first counts for more than any of the second


class LeastLoaded:
    """A set of engines with a load each; `least` costs O(log n), however often loads change.

    A heap with an entry for every load that was put; those that hold no longer are passed over.
    """

    def __init__(self) -> None:
        """Empty."""
        self.loads: dict[int, Load] = {}  # of the members; changed by `put` and `discard` alone
        self._heap: list[tuple[Load, int]] = []

    def put(self, engine: int, load: Load) -> None:
        """Make it a member, or change its load."""
        if self.loads.get(engine) == load:
            return
        self.loads[engine] = load
        heapq.heappush(self._heap, (load, engine))
        if len(self._heap) > 16 + _MAX_OUTDATED * len(self.loads):
            self._heap = [(load, member) for member, load in self.loads.items()]
            heapq.heapify(self._heap)

    def discard(self, engine: int) -> None:
        """Let it be no member."""
        self.loads.pop(engine, None)

    def least(self) -> int | None:
        """The member with the least load, of equal ones the first; None when there is none."""
        heap = self._heap
        while heap and self.loads.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][1] if heap else None
