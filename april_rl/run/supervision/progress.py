"""Time for which each worker has made no progress, and for which it has been stopped."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from april_rl.run.supervision.node_monitor import ProcessStatus

# If the controller was suspended for an hour, its workers were not watched for an hour.
_MAX_ELAPSED_S = 3.0


@dataclass(slots=True)
class WorkerProgress:
    """The progress of one worker."""

    beats: int = -1  # at the last update
    no_progress_s: float = 0.0  # since its last beat, as long as it was waited for
    is_stopped: bool = False  # at the last update
    stopped_s: float = 0.0  # since its process was first found stopped; 0 when it is not
    peak_rss_bytes: int = 0  # the largest resident memory that was found


class ProgressTimer:
    """Adds up time between the controller's own checks, so that clocks are never compared."""

    def __init__(self, num_workers: int) -> None:
        self.workers = [WorkerProgress() for _ in range(num_workers)]

    def update(
        self,
        statuses: Sequence[ProcessStatus],
        *,
        elapsed_s: float,
        waited_for: Collection[int | None],
    ) -> None:
        """Take in each worker's status; time without progress counts for `waited_for` alone."""
        elapsed_s = min(elapsed_s, _MAX_ELAPSED_S)
        for rank, (worker, status) in enumerate(zip(self.workers, statuses, strict=True)):
            beats = status.activity.beats
            is_idle = beats == worker.beats and rank in waited_for
            worker.no_progress_s = worker.no_progress_s + elapsed_s if is_idle else 0.0
            still_stopped = worker.is_stopped and status.is_stopped
            worker.stopped_s = worker.stopped_s + elapsed_s if still_stopped else 0.0
            worker.beats, worker.is_stopped = beats, status.is_stopped
            worker.peak_rss_bytes = max(worker.peak_rss_bytes, status.rss_bytes)
