"""Copy a few rows of a set to a file, with the set's own columns."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from april_rl.config.task import PromptSetConfig
from april_rl.data.procedural import PREFIX
from april_rl.data.sources import open_source, quiet


def write_sampled_rows(
    chosen: PromptSetConfig, path: Path, *, key: str, num_rows: int
) -> Path | None:
    """Write at most `num_rows` evenly spaced rows to the .jsonl file `path`, and return it.

    Returns None for a procedural task, whose rows are drawn, not read. Raises DataError, which
    names the setting `key`.
    """
    if chosen.path.startswith(PREFIX):
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as work:
        rows = open_source(chosen, key=key, seed=0, folder=Path(work)).table
        places = np.linspace(0, len(rows) - 1, min(num_rows, len(rows))).astype(int)
        with quiet():
            rows.select(places).to_json(path)
    return path
