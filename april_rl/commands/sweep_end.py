"""The end of a sweep (`--multirun`): compare its runs, and say which of them failed."""

from __future__ import annotations

import sys
from pathlib import Path

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class CompareRuns(Callback):
    """A Hydra callback that compares the runs of a sweep at its end.

    The program ends with status 1 if a run has failed. A launcher that starts runs elsewhere
    reports failures by itself.
    """

    def __init__(self) -> None:
        """Begin with no ended run."""
        self._failed: list[str] = []

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: object) -> None:
        """Note a run that failed; called by Hydra."""
        if job_return.return_value:
            self._failed.append(str(config.hydra.runtime.output_dir))

    def on_multirun_end(self, config: DictConfig, **_: object) -> None:
        """Compare the runs; called by Hydra in the program that the sweep was started with."""
        from april_rl.commands.at_end import comparison_lines

        print(comparison_lines(Path(config.hydra.sweep.dir)), flush=True)
        if self._failed:
            print(f"failed: {', '.join(self._failed)}", file=sys.stderr, flush=True)
            sys.exit(1)  # Hydra turns other exceptions of a callback into warnings
