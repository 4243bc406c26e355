"""A tracker, and its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from april_rl.config.tracking import TrackingConfig
from april_rl.metrics import Histogram
from april_rl.run.tracking.labels import RunLabels

SAMPLE_COLUMNS = (
    *("step", "prompt_id", "index", "prompt", "response", "ages", "num_tokens"),
    *("reward", "reward_parts", "advantage", "finish_reason", "source"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSettings:
    """Settings of the trackers of a run."""

    tracking: TrackingConfig
    labels: RunLabels
    run_dir: Path
    config: Mapping[str, object]
    wandb_id: str = ""  # the W&B run to continue
    first_step: int | None = None  # first step of a resumed run


class Backend(Protocol):
    """A tracker: records the metrics of steps, and tables of samples."""

    id: str  # a later process continues the run by this id; empty if the tracker needs none
    can_replace: bool  # whether a step that is sent again by a resumed run replaces the old one

    def log(
        self, step: int, values: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        """Record the metrics of a step."""

    def samples(self, step: int, rows: Sequence[Sequence[object]]) -> None:
        """Record a table with SAMPLE_COLUMNS."""

    def finish(self, error: BaseException | None = None) -> None:
        """End the record within seconds, also without a network; `error` ended the run."""
