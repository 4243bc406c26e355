"""The directory of a run: the only place where a start or a resume changes files in it.

`RunDirectory.take_over` is called last, after everything that can refuse a run: settings, data,
the reward, the memory plan, the engines and the learner's weights. A resume that is refused
therefore changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from april_rl.config import TrainConfig
from april_rl.run.checkpointing.checkpointer import CONFIG
from april_rl.run.checkpointing.folder import set_aside_later
from april_rl.run.checkpointing.resume import AUTO, Resumed
from april_rl.run.tracking.labels import RunLabels
from april_rl.run.tracking.terminal import View
from april_rl.run.tracking.tracker import Tracker, config_text

_UNTOLD = ("resume", "run_dir")


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of a run, before and after the run takes it over."""

    path: Path
    config: TrainConfig
    shown: Mapping[str, object]  # the configuration as config.yaml shows it
    resumed: Resumed | None
    labels: RunLabels | None = None  # how the trackers show the run

    def take_over(self, view: View) -> Tracker:
        """Return the tracker, which continues the metrics and samples of the directory.
        Checkpoints after the one that the run resumes from are set aside. Later metrics and
        samples are removed, because the run makes them again.
        """
        config, resumed = self.config, self.resumed
        is_same_run = resumed is not None and resumed.is_within(self.path)
        for later in set_aside_later(resumed.path) if resumed and is_same_run else ():
            view.message(
                f"a later checkpoint of the branch that this run leaves is set aside: {later}"
            )
        tracker = Tracker(
            run_dir=self.path,
            config=self.shown,
            num_steps=config.trainer.num_steps,
            tracking=config.tracking,
            advantage=config.algorithm.advantage,
            labels=self.labels or RunLabels(name=config.name),
            view=view,
            first_step=self._first_step(),
            wandb_id=resumed.state["wandb_id"] if resumed and is_same_run else "",
        )
        if resumed is not None:
            view.message(f"resumed from {resumed.path}, after step {resumed.manifest.step}")
            if changes := changes_since(resumed.path, self.shown):
                view.message(f"changed since that checkpoint: {', '.join(changes)}")
        return tracker

    def _first_step(self) -> int | None:
        """Return the first step whose metrics are made again, or None for a new run."""
        if self.resumed is not None:
            return self.resumed.manifest.step + 1
        # The run ended before its first checkpoint.
        return 0 if self.config.resume == AUTO else None


def changes_since(checkpoint: Path, shown: Mapping[str, object]) -> list[str]:
    """Return the settings that differ between a checkpoint's configuration and `shown`, with both
    values.
    """
    saved = yaml.safe_load((checkpoint / CONFIG).read_text(encoding="utf-8"))
    return list(_changes(saved, yaml.safe_load(config_text(shown))))


def _changes(
    before: Mapping[str, object], after: Mapping[str, object], prefix: str = ""
) -> Iterator[str]:
    for name in dict.fromkeys((*before, *after)):
        key, old, new = f"{prefix}{name}", before.get(name), after.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _changes(old, new, f"{key}.")
        elif old != new and old != "auto" and key not in _UNTOLD:
            yield f"{key} from {_text_of(old)} to {_text_of(new)}"


def _text_of(value: object) -> str:
    return "null" if value is None else str(value)
