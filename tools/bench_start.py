"""What a benchmark prints before it begins: how long it will take, and whether other work keeps the
machine busy.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import psutil

_INTERVAL_S = 1.0
_MUCH_OF_A_CORE = 0.2  # services of an idle machine use less


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherWork:
    """Processor time that other processes used while this one waited."""

    cores: float  # busy on average
    busiest: str  # command and process id; empty where no process shows
    busiest_cores: float


def say_start(minutes: int) -> None:
    """Print how long the benchmark takes, and a warning if other processes use the machine."""
    print(f"{minutes} minutes on two idle cores, unless options ask for more", flush=True)
    warning = warning_of(other_work(), num_cores=os.cpu_count() or 1)
    if warning:
        print(warning, flush=True)


def warning_of(work: OtherWork, *, num_cores: int) -> str:
    """Return the warning, or "" if the machine is idle."""
    if work.cores < _MUCH_OF_A_CORE:
        return ""
    who = f"; the busiest is {work.busiest} with {work.busiest_cores:.1f}" if work.busiest else ""
    return (
        f"WARNING: other processes keep {work.cores:.1f} of {num_cores} cores busy{who}. "
        "Times will be longer than they should be, and ratios uncertain: end that work, or measure "
        "again later."
    )


def other_work(interval_s: float = _INTERVAL_S) -> OtherWork:
    """Measure for `interval_s` how much every process but this one computes."""
    before, machine_s, started = _process_seconds(), _machine_seconds(), time.perf_counter()
    time.sleep(interval_s)
    took_s = time.perf_counter() - started
    machine_s = _machine_seconds() - machine_s
    own_s, spent_s = 0.0, {}
    for key, seconds in _process_seconds().items():
        spent = seconds - before.get(key, 0.0)
        if key[0] == os.getpid():
            own_s = spent
        else:
            spent_s[key] = spent
    busiest = max(spent_s, key=lambda key: spent_s[key], default=(0, 0.0))
    return OtherWork(
        cores=max(0.0, machine_s - own_s) / took_s,
        busiest=_shown(busiest[0]),
        busiest_cores=spent_s.get(busiest, 0.0) / took_s,
    )


def _machine_seconds() -> float:
    """Return the busy seconds of all cores since the machine started."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def _process_seconds() -> dict[tuple[int, float], float]:
    """Return the processor seconds of every process, by its id and start time."""
    found = {}
    for process in psutil.process_iter(["cpu_times", "create_time"]):
        times = process.info["cpu_times"]
        if times is not None:
            found[process.pid, process.info["create_time"]] = times.user + times.system
    return found


def _shown(pid: int) -> str:
    """Return the command of a process, shortened, and its id."""
    try:
        words = psutil.Process(pid).cmdline()
    except psutil.Error:
        return ""
    if not words:  # a thread of the kernel
        return ""
    command = " ".join([os.path.basename(words[0]), *words[1:]])
    return f"`{command[:60]}` (pid {pid})"
