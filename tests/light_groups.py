"""Pairs of light workers, and a watchdog over them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import ray
from light_workers import LightWorker

from april_rl.runtime.supervision.watchdog import Watchdog


class Group:
    """Two light workers."""

    def __init__(self, *, num_cpus=0) -> None:
        env = {"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}}
        actor = ray.remote(LightWorker).options(num_cpus=num_cpus, runtime_env=env)
        self.actors = [actor.remote() for _ in range(2)]
        self.processes = ray.get([actor.process.remote() for actor in self.actors])
        self.pids = [process.pid for process in self.processes]

    def join(self, folder: Path) -> None:
        """Form a process group: from now on an update is a collective."""
        ray.get([a.join.remote(str(folder), rank, 2) for rank, a in enumerate(self.actors)])

    def update(self, *faults: str) -> list[ray.ObjectRef]:
        """Start an update of both ranks, worker 1 with the fault, if any."""
        return [self.actors[0].update.remote(), self.actors[1].update.remote(*faults)]

    def alive(self) -> list[int]:
        """Return the pids of workers that are still running."""
        states = {pid: psutil.Process(pid).status() for pid in self.pids if psutil.pid_exists(pid)}
        return [pid for pid, state in states.items() if state != psutil.STATUS_ZOMBIE]

    def wait_for_end(self) -> None:
        """Wait some seconds until no worker is left."""
        deadline = time.monotonic() + 5
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.05)


def run_alone(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `script` in its own process and its own Ray, in `folder`, which is its argument."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(folder)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


class GroupWatchdog(Watchdog):
    """A watchdog over a group; `file` is its report."""

    def __init__(self, group, folder, *, stall_timeout_s=60.0, call_timeout_s=60.0) -> None:
        self.file = folder / "stall_report.txt"
        super().__init__(
            report=self.file, stall_timeout_s=stall_timeout_s, call_timeout_s=call_timeout_s
        )
        self.watch(group.actors)
