"""Checks before Hydra creates a run directory.

Hydra itself would end in a traceback, or ignore a sweep that was chosen without --multirun.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class CheckRunDir(Callback):
    """A Hydra callback that refuses a directory that is not writable, and a sweep in one run."""

    def on_run_start(self, config: DictConfig, **_: object) -> None:
        """Check before a single run; called by Hydra."""
        if params := config.hydra.sweeper.params:  # a single run would ignore these values
            _end(f"the sweep has several values of {' and '.join(params)}: add --multirun")
        _check("hydra.run.dir", Path(config.hydra.run.dir))

    def on_multirun_start(self, config: DictConfig, **_: object) -> None:
        """Check before a sweep; called by Hydra."""
        _check("hydra.sweep.dir", Path(config.hydra.sweep.dir))


def _check(key: str, path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(path, os.W_OK | os.X_OK) else "permission denied"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        _end(f"{key}={path} cannot be written: {reason}")


def _end(message: str) -> NoReturn:
    # Hydra turns exceptions of a callback into warnings, except SystemExit.
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(1)
