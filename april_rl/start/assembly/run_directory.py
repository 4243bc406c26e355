"""The directory of a run: the only place where a start or a resume changes files in it.

`take_over` is called last, after everything that can refuse a run: settings, data,
the reward, the memory plan, the engines and the learner's weights. A resume that is refused
therefore changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def take_over(
    path: Path,
    config: TrainConfig,
    view: View,
    *,
    shown: Mapping[str, object],
    resumed: Resumed | None,
    labels: RunLabels | None = None,
) -> Tracker:
    """Return the tracker, which continues the metrics and samples of the directory `path`;
    config.yaml shows `shown`, and the trackers `labels`. Checkpoints after the one that the run
    resumes from are set aside. Later metrics and samples are removed, because the run makes them
    again.
    """
    is_same_run = resumed is not None and resumed.is_within(path)
    for later in set_aside_later(resumed.path) if resumed and is_same_run else ():
        view.message(f"a later checkpoint of the branch that this run leaves is set aside: {later}")
    # With resume=auto the run may have ended before its first checkpoint.
    first_step = 0 if config.resume == AUTO else None
    tracker = Tracker(
        run_dir=path,
        config=shown,
        num_steps=config.trainer.num_steps,
        tracking=config.tracking,
        advantage=config.algorithm.advantage,
        labels=labels or RunLabels(name=config.name),
        view=view,
        first_step=first_step if resumed is None else resumed.manifest.step + 1,
        wandb_id=resumed.state["wandb_id"] if resumed and is_same_run else "",
    )
    if resumed is not None:
        view.message(f"resumed from {resumed.path}, after step {resumed.manifest.step}")
        if changes := changes_since(resumed.path, shown):
            view.message(f"changed since that checkpoint: {', '.join(changes)}")
    return tracker


def changes_since(checkpoint: Path, shown: Mapping[str, object]) -> list[str]:
    """Return the settings that differ from a checkpoint's configuration, with both values."""
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
