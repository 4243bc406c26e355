"""Write the report at a run's end and the comparison at a sweep's end, each in a process of its
own: a failure there does not change how the run has ended.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

_PATIENCE_S = 120.0


def report_line(run_dir: Path, *, since_s: float) -> str | None:
    """Write the report of a run that has just ended, and return where it is and what it advises.
    Return None if the run logged nothing after `since_s` (seconds since the epoch).
    """
    metrics = run_dir / "metrics.jsonl"
    if not metrics.is_file() or metrics.stat().st_mtime < since_s:
        return None
    written, text = _run("report", str(run_dir))
    return f"report: {text}" if written else f"report: not written ({text})"


class CompareRuns(Callback):
    """A Hydra callback that compares the runs of a sweep, and ends with status 1 if a run has
    failed. A launcher that starts runs elsewhere reports failures by itself.
    """

    def __init__(self) -> None:
        self._failed: list[str] = []

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: object) -> None:
        """Note a run that failed; called by Hydra."""
        if job_return.return_value:
            self._failed.append(str(config.hydra.runtime.output_dir))

    def on_multirun_end(self, config: DictConfig, **_: object) -> None:
        """Compare the runs; called by Hydra in the program that the sweep was started with."""
        folder = Path(config.hydra.sweep.dir)
        written, text = _run("compare", str(folder), "--html", str(folder / "comparison.html"))
        print(text if written else f"comparison: not written ({text})", flush=True)
        if self._failed:
            print(f"failed: {', '.join(self._failed)}", file=sys.stderr, flush=True)
            sys.exit(1)  # Hydra turns other exceptions of a callback into warnings


def _run(*arguments: str) -> tuple[bool, str]:
    command = [sys.executable, "-m", "april_rl", *arguments]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    if ran.returncode == 0:
        return True, ran.stdout.strip()
    reason = (ran.stderr.strip().splitlines() or ["no message"])[-1]
    return False, f"{reason}; to try again: python {' '.join(command[1:])}"
