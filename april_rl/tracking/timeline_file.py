"""timeline/step_00010.json: the timeline of a step whose samples are saved."""

from __future__ import annotations

import json
from pathlib import Path

from april_rl.rollout.measures.timeline import Timeline


def write_timeline(folder: Path, step: int, timeline: Timeline) -> Path:
    """Write one JSON object into `folder` and return its path. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:05d}.json"
    text = json.dumps({"step": step, **timeline.plain()}, separators=(",", ":"))
    path.write_text(text + "\n", encoding="utf-8")
    return path


def read_timeline(path: Path) -> Timeline:
    """Return the timeline in a file. Raises ValueError when it has none."""
    try:
        return Timeline.of(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the timeline of a step ({error!r}): remove it") from error
