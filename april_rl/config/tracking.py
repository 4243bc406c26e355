"""Settings of what a run shows and records."""

from __future__ import annotations

from dataclasses import dataclass, field

from april_rl.config.checks import check_bounds, require, within
from april_rl.config.choices import TrackingBackend, WandbMode


@dataclass(slots=True, kw_only=True)
class TrackingConfig:
    """Settings of what a run shows and records; metrics.jsonl is always written."""

    # trackers in addition to metrics.jsonl: any of wandb, trackio and tensorboard; []: none
    backends: list[TrackingBackend] = field(default_factory=lambda: [TrackingBackend.wandb])
    wandb: WandbMode = WandbMode.offline  # with wandb among the backends
    project: str = "april_rl"  # project in W&B and trackio
    # steps between two writes of all samples, to samples/ and as a table to the trackers;
    # samples of the first and the last step and of evaluations are always written, and every 20
    # steps a few are shown; null: none at all
    save_samples_every: int | None = within(">= 1", 10)

    def __post_init__(self) -> None:
        check_bounds("tracking", self)
        names = [backend.value for backend in self.backends]
        require(len(set(names)) == len(names), f"tracking.backends={names} names a tracker twice")
        require(
            self.wandb is not WandbMode.online or "wandb" in names,
            f"tracking.wandb=online has no effect with tracking.backends={names}; add wandb",
        )
