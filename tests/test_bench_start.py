"""The warning of a benchmark about a busy machine."""

from __future__ import annotations

import subprocess
import sys

from source_tree import ROOT

sys.path.insert(0, str(ROOT / "tools"))

from bench_start import OtherWork, other_work, warning_of


def test_a_busy_machine_is_warned_of_and_an_idle_one_is_not() -> None:
    """Fails when the warning names no process, or comes without other work."""
    busy = OtherWork(cores=1.3, busiest="`python train.py` (pid 7)", busiest_cores=0.98)
    warning = warning_of(busy, num_cores=2)
    assert "keep 1.3 of 2 cores busy; the busiest is `python train.py` (pid 7) with 1.0" in warning
    assert not warning_of(OtherWork(cores=0.1, busiest="", busiest_cores=0.0), num_cores=2)


def test_the_load_of_other_processes_is_measured() -> None:
    """Fails when the processor time of a process that spins is not found."""
    spinning = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(spinning) as process:
        work = other_work(interval_s=1.0)
        process.kill()
    assert work.cores > 0.2
    assert work.busiest_cores > 0.1
