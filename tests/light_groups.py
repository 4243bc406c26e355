"""Pairs of light workers, and a watchdog over them."""

import os
import subprocess
import sys
from pathlib import Path

import ray
from light_workers import LightWorker
from own_process import is_running, wait_until

from april_rl.run.supervision.watchdog import Watchdog


class Group:
    """Two light workers."""

    def __init__(self, *, num_cpus=0) -> None:
        env = {"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}}
        actor = ray.remote(LightWorker).options(num_cpus=num_cpus, runtime_env=env)
        self.actors = [actor.remote() for _ in range(2)]
        self.processes = ray.get([actor.process.remote() for actor in self.actors])
        self.pids = [process.pid for process in self.processes]

    def join(self, folder: Path) -> None:
        """Form a process group, after which an update is a collective."""
        ray.get([a.join.remote(str(folder), rank, 2) for rank, a in enumerate(self.actors)])

    def update(self, *faults: str) -> list[ray.ObjectRef]:
        """Start an update of both ranks, with the fault in worker 1, if there is one."""
        return [self.actors[0].update.remote(), self.actors[1].update.remote(*faults)]

    def alive(self) -> list[int]:
        return [pid for pid in self.pids if is_running(pid)]

    def wait_for_end(self) -> None:
        wait_until(lambda: not self.alive())


def run_alone(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `script` in its own process with its own Ray; its argument is `folder`."""
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
