"""Write the report at a run's end and the comparison at a sweep's end, each in a process of its
own: a failure there does not change how the run has ended.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_PATIENCE_S = 120.0


def report_line(run_dir: Path, *, since_s: float) -> str | None:
    """Write the report of a run that has just ended, and return where it is and what it advises.

    Return None if the run logged nothing after `since_s` (seconds since the epoch), because it
    never began.
    """
    metrics = run_dir / "metrics.jsonl"
    if not metrics.is_file() or metrics.stat().st_mtime < since_s:
        return None
    written, text = _run("report", str(run_dir))
    return f"report: {text}" if written else f"report: not written ({text})"


def comparison_lines(sweep_dir: Path) -> str:
    """Write the comparison of the runs of a sweep. Return its table and where its page is, or
    the reason why there is none.
    """
    page = sweep_dir / "comparison.html"
    written, text = _run("compare", str(sweep_dir), "--html", str(page))
    return text if written else f"comparison: not written ({text})"


def _run(*arguments: str) -> tuple[bool, str]:
    """Run a command; return whether it succeeded, and its output or error."""
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
    return False, f"{reason}; again: python {' '.join(command[1:])}"
