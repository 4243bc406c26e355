"""The report that a run writes at its end, in a process of its own: whatever goes wrong there, the
run has ended as it did.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_PATIENCE_S = 120.0


def report_line(run_dir: Path, *, since_s: float) -> str | None:
    """Write the report of a run that has just ended, and return the line that says where it is.

    None where the run logged nothing after `since_s`, in seconds since the epoch: it never began.
    """
    metrics = run_dir / "metrics.jsonl"
    if not metrics.is_file() or metrics.stat().st_mtime < since_s:
        return None
    command = [sys.executable, "-m", "april_rl", "report", str(run_dir)]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"report: not written ({error})"
    if ran.returncode == 0:
        return f"report: {ran.stdout.strip()}"
    reason = (ran.stderr.strip().splitlines() or ["no message"])[-1]
    return f"report: not written ({reason}); later: python {' '.join(command[1:])}"
