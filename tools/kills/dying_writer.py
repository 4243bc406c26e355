"""Trains as april_rl.train does, and kills itself just before a checkpoint folder gets its final
name, when the file `latest` already contains that name: `dying_writer.py first|second key=value
...`.

`first`: in the first save of a step. `second`: in the second save of a step, when the first
checkpoint has just been hidden. The run is stopped when a checkpoint is written, and a stop saves
the step again.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from april_rl.run.checkpointing import checkpointer, folder
from april_rl.start.command_line import main

_RENAME = Path.rename


def _train(*, is_second: bool) -> None:
    num_commits = 0

    def rename(path: Path, target: Path) -> Path:
        hidden = path.with_suffix(".removed")
        if path.suffix == ".partial" and hidden.exists() == is_second:
            os.kill(os.getpid(), signal.SIGKILL)
        return _RENAME(path, target)

    def commit(*args: Any, **settings: Any) -> Path:  # noqa: ANN401
        nonlocal num_commits
        with patch.object(Path, "rename", rename):
            path = folder.commit(*args, **settings)
        num_commits += 1
        if num_commits == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return path

    with patch.object(checkpointer, "commit", commit):
        main()


if __name__ == "__main__":
    _train(is_second=sys.argv.pop(1) == "second")
