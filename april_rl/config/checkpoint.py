"""Settings of checkpoints and exports."""

from __future__ import annotations

from dataclasses import dataclass

from april_rl.config.checks import check_bounds, within


@dataclass(slots=True, kw_only=True)
class CheckpointConfig:
    """Settings of what a run writes to disk: checkpoints to resume from, exports to use.

    The last step always writes both.
    """

    every_steps: int | None = within(">= 1", None)  # steps between checkpoints; null: by time only
    # minutes between checkpoints; null: by steps only
    every_minutes: float | None = within("> 0", 30.0)
    keep_last: int = within(">= 1", 2)  # newest checkpoints to keep; older ones are removed
    # eval/NAME/avg_at_k, pass_at_k or maj_at_k, with NAME of evaluation.sets: the checkpoint with
    # the highest value is kept, too
    best_metric: str | None = None
    # steps between Hugging Face exports; null: only at the end
    export_every_steps: int | None = within(">= 1", None)
    # seconds that a run has to write a checkpoint and end after Ctrl-C or another signal
    stop_deadline_s: float = within("> 0", 120.0)

    def __post_init__(self) -> None:
        check_bounds("checkpoint", self)
