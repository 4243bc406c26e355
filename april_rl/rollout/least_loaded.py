"""Which of many has the least load, without looking at all of them."""

from __future__ import annotations

import heapq

# Outdated entries are removed when they outnumber the members by so much.
_MAX_OUTDATED = 4


class LeastLoaded:
    """A set of engines with a load each; `least` costs O(log n), however often loads change.

    A heap with an entry for every load that was ever asked about; those that hold no longer are
    passed over. Loads change far more often than anybody asks, so entries are made only then.
    """

    def __init__(self) -> None:
        """Empty."""
        self.loads: dict[int, float] = {}  # of the members; changed by `put` and `discard` alone
        self._changed: set[int] = set()  # engines whose load may have no entry
        self._heap: list[tuple[float, int]] = []

    def put(self, engine: int, load: float) -> None:
        """Make it a member, or change its load."""
        self.loads[engine] = load
        self._changed.add(engine)

    def discard(self, engine: int) -> None:
        """Let it be no member."""
        self.loads.pop(engine, None)

    def least(self) -> int | None:
        """The member with the least load, of equal ones the first; None when there is none."""
        self._note_changes()
        heap = self._heap
        while heap and self.loads.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def _note_changes(self) -> None:
        """Have an entry for the load of every member."""
        for engine in self._changed:
            if engine in self.loads:
                heapq.heappush(self._heap, (self.loads[engine], engine))
        self._changed.clear()
        if len(self._heap) > 16 + _MAX_OUTDATED * len(self.loads):
            self._heap = [(load, member) for member, load in self.loads.items()]
            heapq.heapify(self._heap)
