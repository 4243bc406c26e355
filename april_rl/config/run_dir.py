"""The check of the run directory, before Hydra makes it: Hydra itself would end in a traceback."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class CheckRunDir(Callback):
    """A Hydra callback; ends the program with one message when the directory cannot be written."""

    def on_run_start(self, config: DictConfig, **_: object) -> None:
        """Called once before a single run."""
        _check("hydra.run.dir", Path(config.hydra.run.dir))

    def on_multirun_start(self, config: DictConfig, **_: object) -> None:
        """Called once before a sweep."""
        _check("hydra.sweep.dir", Path(config.hydra.sweep.dir))


def _check(key: str, path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(path, os.W_OK | os.X_OK) else "permission denied"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        # Hydra turns what a callback raises into a warning; SystemExit it lets pass.
        print(f"error: {key}={path} cannot be written: {reason}", file=sys.stderr, flush=True)
        sys.exit(1)
