"""Ray only starts workers, and workers are ended even if Ray does not end them, with
one message.
"""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import psutil
import pytest
import ray
from cluster_snapshots import process_of
from light_groups import Group, run_alone
from own_process import is_running, wait_until

from april_rl.run.supervision.heartbeat import WorkerProcess, read_stat
from april_rl.run.supervision.watchdog import Watchdog
from april_rl.training.runtime.cluster import start_ray, stop_ray

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def embedded_ray() -> Iterator[list[psutil.Process]]:
    """Start Ray for the tests of this module, of which one stops it; yield what was started."""
    before = psutil.Process().children()
    start_ray(num_workers=1, address=None)
    yield [each for each in psutil.Process().children() if each not in before]
    stop_ray()


@dataclass
class Call:
    """A method of an actor whose result is known."""

    result: WorkerProcess

    def remote(self) -> ray.ObjectRef:
        return ray.put(self.result)


@dataclass
class NoActor:
    """A worker that Ray refuses to end because it does not know it."""

    process: Call
    _actor_id: str = "none"


@pytest.mark.usefixtures("embedded_ray")
def test_ray_starts_no_idle_processes():
    """Fails when it starts one for each core, and a GPU machine has hundreds of cores."""
    group = Group()
    raylet = psutil.Process(group.pids[0]).parent()
    titles = []
    for each in raylet.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # the process has ended in the meantime
            titles.append(" ".join(each.cmdline()))
    assert sum(title.startswith("ray::LightWorker") for title in titles) == 2
    assert not any(title.startswith("ray::IDLE") for title in titles)


@pytest.mark.usefixtures("embedded_ray")
def test_a_worker_that_ray_does_not_end_is_killed(tmp_path):
    """Fails when the process survives Ray's error; the error is still raised."""
    code = "import time; print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        here = ray.get_runtime_context().get_node_id()
        start_ticks = read_stat(process.pid).start_ticks
        found = replace(process_of(process.pid, start_ticks=start_ticks), node_id=here)
        watchdog = Watchdog(report=tmp_path / "report", stall_timeout_s=60, call_timeout_s=60)
        watchdog.watch([NoActor(Call(found))])
        try:
            with pytest.raises(ValueError, match="only supported for actors"):
                watchdog.kill_workers()
            assert process.wait(timeout=20) == -signal.SIGKILL
        finally:
            process.kill()


def test_stopping_ray_waits_until_its_processes_have_ended(embedded_ray, monkeypatch):
    """On a busy machine, one second is too short for each. Fails when a process is left to the
    garbage collector, which would print a warning in a later test.
    """
    wait = subprocess.Popen.wait

    def wait_on_a_busy_machine(process, timeout=None):
        return wait(process, 0 if timeout == 1 else timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_on_a_busy_machine)
    stop_ray()
    assert [each for each in embedded_ray if each.is_running()] == []
    assert len(embedded_ray) > 2


def test_the_terminal_shows_only_the_watchdogs_message_about_a_killed_worker(tmp_path):
    """Ray prints pages about a worker, and about its own raylet. Fails when the terminal shows
    them.
    """
    script = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "import psutil\n"
        "from april_rl.errors import RunError\n"
        "from april_rl.training.runtime.cluster import start_ray\n"
        "from light_groups import Group, GroupWatchdog\n"
        "start_ray(num_workers=2, address=None)\n"
        "group = Group()\n"
        "watchdog = GroupWatchdog(group, Path(sys.argv[1]))\n"
        "os.kill(group.pids[1], signal.SIGKILL)\n"
        "try:\n"
        "    watchdog.results(group.update())\n"
        "except RunError as error:\n"
        "    print(str(error).partition(':')[0])\n"
        "mine = psutil.Process().children(recursive=True)\n"
        "[raylet] = [p for p in mine if p.name() == 'raylet']\n"
        "time.sleep(2)\n"
        "raylet.kill()\n"
        "time.sleep(3)\n"
    )
    done = run_alone(script, tmp_path)
    [line] = done.stdout.splitlines()
    assert line.startswith("worker 1 (pid "), done.stderr
    assert "raylet" not in done.stderr.lower()


@pytest.mark.soak
@pytest.mark.cpu_engine
def test_a_run_without_rays_head_process_ends_and_leaves_no_worker(tmp_path):
    """Once while a call is running, once when the run ends first. Fails when closing the workers
    calls Ray's head process and waits for it for ever, or when a worker lives on.
    """
    script = (
        "import sys, time\n"
        "from contextlib import closing\n"
        "from pathlib import Path\n"
        "from types import SimpleNamespace\n"
        "import psutil\n"
        "from april_rl.training.runtime.layout import Layout\n"
        "from april_rl.training.runtime.workers import RayWorkers\n"
        "from april_rl.run.supervision.watchdog import Watchdog\n"
        "watchdog = Watchdog(report=Path(sys.argv[1]), stall_timeout_s=600, call_timeout_s=600)\n"
        "layout = Layout(device='cpu', num_workers=1, tensor_parallel_size=1)\n"
        "settings = SimpleNamespace(device='cpu', threads=1,\n"
        "    config=SimpleNamespace(lora=None, engine=None))\n"
        "workers = RayWorkers(layout, settings=settings, address=None, watchdog=watchdog)\n"
        "with closing(workers):\n"
        "    workers.memory()\n"
        "    mine = psutil.Process().children(recursive=True)\n"
        "    print(*[p.pid for p in mine if 'WorkerActor' in ' '.join(p.cmdline())], flush=True)\n"
        "    [head] = [p for p in mine if p.name() == 'gcs_server']\n"
        "    head.kill()\n"
        "    while WAITS:\n"
        "        time.sleep(1)\n"
        "        workers.memory()\n"
        "print('closed')\n"
    )
    for waits in (False, True):
        done = run_alone(f"WAITS = {waits}\n{script}", tmp_path)
        pids, *rest = done.stdout.splitlines()
        assert pids, done.stderr
        assert rest == ([] if waits else ["closed"])
        assert ("Failed to connect to GCS" in done.stderr) is waits, done.stderr
        wait_until(lambda pids=pids: not any(map(is_running, map(int, pids.split()))))
