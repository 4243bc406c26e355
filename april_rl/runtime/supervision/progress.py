"""For how long each worker has shown no progress, and for how long it has been stopped."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from april_rl.runtime.supervision.node_monitor import Vitals

# A controller that was itself suspended for an hour has not watched for an hour.
_MOST_BETWEEN_LOOKS_S = 3.0


@dataclass(slots=True)
class _OfRank:
    beats: int = -1
    silent_s: float = 0.0
    stopped_s: float = 0.0
    most_rss_bytes: int = 0


class Silence:
    """Counts in the controller's own looks, so that no clocks are compared."""

    def __init__(self, num_workers: int) -> None:
        """Nothing has been seen yet."""
        self._ranks = [_OfRank() for _ in range(num_workers)]

    def observe(
        self, vitals: Sequence[Vitals], *, passed_s: float, waited_for: Collection[int | None]
    ) -> None:
        """What is seen of each worker, by rank, `passed_s` after the look before; one that nobody
        waits for is not silent.
        """
        passed_s = min(passed_s, _MOST_BETWEEN_LOOKS_S)
        for rank, (known, seen) in enumerate(zip(self._ranks, vitals, strict=True)):
            is_quiet = seen.activity.beats == known.beats and rank in waited_for
            known.silent_s = known.silent_s + passed_s if is_quiet else 0.0
            known.stopped_s = known.stopped_s + passed_s if seen.is_stopped else 0.0
            known.beats = seen.activity.beats
            known.most_rss_bytes = max(known.most_rss_bytes, seen.rss_bytes)

    def silent_s(self, rank: int) -> float:
        """Since its last sign of progress, as far as it was waited for."""
        return self._ranks[rank].silent_s

    def stopped_s(self, rank: int) -> float:
        """Since it was first seen stopped; 0 when it is not."""
        return self._ranks[rank].stopped_s

    def most_rss_bytes(self, rank: int) -> int:
        """The most memory it was seen with."""
        return self._ranks[rank].most_rss_bytes
