"""Settings of checkpoints and exports."""

from __future__ import annotations

from dataclasses import dataclass

from april_rl.config.checks import above, at_least, require


@dataclass(slots=True, kw_only=True)
class CheckpointConfig:
    """What a run writes to disk: checkpoints to resume from, exports to use.

    The last step always writes both.
    """

    every_steps: int = 0  # steps between checkpoints; 0: by time only
    every_minutes: float = 30.0  # minutes between checkpoints; 0: by steps only
    keep_last: int = 2  # checkpoints; older ones are removed
    keep_best: int = 0  # checkpoints kept besides: those with the highest best_metric
    best_metric: str = ""  # eval/NAME/avg_at_k, pass_at_k or maj_at_k, NAME of evaluation.sets
    export_every_steps: int = 0  # steps between Hugging Face exports; 0: only at the end
    # seconds that a run has to write a checkpoint and end after Ctrl-C, SIGTERM or SIGUSR1
    stop_deadline_s: float = 120.0

    def __post_init__(self) -> None:
        at_least(
            "checkpoint",
            0,
            every_steps=self.every_steps,
            every_minutes=self.every_minutes,
            export_every_steps=self.export_every_steps,
            keep_best=self.keep_best,
        )
        at_least("checkpoint", 1, keep_last=self.keep_last)
        above("checkpoint", 0, stop_deadline_s=self.stop_deadline_s)
        require(
            (self.keep_best > 0) == bool(self.best_metric),
            "checkpoint.keep_best and checkpoint.best_metric go together: how many are kept, by "
            f"which metric; got {self.keep_best} and '{self.best_metric}'",
        )
