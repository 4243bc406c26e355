"""Workers killed, stopped, stuck or out of memory: noticed within seconds, reported, ended.

Real Ray and real collectives over gloo, with workers that have neither model nor engine.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import ray
from light_groups import Group, Watch, run_alone

from april_rl.rollout.ports import EngineStalledError
from april_rl.rollout.requests import Requests
from april_rl.runtime.cluster import start_ray, stop_ray
from april_rl.runtime.engines import RayEngines
from april_rl.runtime.supervision.failures import (
    WorkerDiedError,
    WorkerMemoryError,
    WorkerStalledError,
)
from april_rl.runtime.supervision.watchdog import Watchdog

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine]


@pytest.fixture(scope="module", autouse=True)
def embedded_ray() -> Iterator[None]:
    start_ray(num_workers=4, address=None)
    yield
    stop_ray()


@dataclass(kw_only=True)
class Crew:
    """What `RayEngines` asks of the workers."""

    engines: list[list[object]]
    policy_version: int
    watchdog: Watchdog


@pytest.fixture(scope="module")
def lasting() -> Group:
    """For what leaves workers as they were."""
    return Group()


@pytest.fixture
def group(tmp_path) -> Iterator[Group]:
    """For what does not; no process is left of it, however the test ends."""
    new = Group()
    watchdog = Watch(new, tmp_path)
    yield new
    watchdog.end()
    new.wait_for_end()
    assert not new.alive()


def after(seconds, act) -> None:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()


def keep_ticking(engines: RayEngines) -> None:
    while engines.wait(1.0):
        engines.launch(0, Requests(1, 0), slots=1, max_steps=8)


def test_workers_that_are_well_give_results_and_no_report(lasting, tmp_path):
    watch = Watch(lasting, tmp_path)
    assert watch.results(lasting.update(), is_steady=True) == [1, 1]
    assert not watch.file.exists()
    assert not watch.has_failed


def test_a_worker_that_shows_progress_may_take_as_long_as_it_needs(lasting, tmp_path):
    """Fails when a call has a limit as a whole."""
    watch = Watch(lasting, tmp_path, stall_timeout_s=2.0)
    assert watch.results([lasting.actors[0].work.remote(8, 0.5)], is_steady=True) == [8]


def test_a_call_without_progress_has_the_longer_limit(lasting, tmp_path):
    """Fails when every call is taken for a steady one."""
    watch = Watch(lasting, tmp_path, stall_timeout_s=1.0)
    assert watch.results([lasting.actors[0].work.remote(1, 3.5)]) == [1]


def test_ticks_that_come_back_without_an_engine_step_are_a_stall(lasting, tmp_path):
    """Every call returns at once. Fails when an answer alone counts as progress."""
    watch = Watch(lasting, tmp_path)
    crew = Crew(engines=[lasting.actors[:1]], policy_version=0, watchdog=watch)
    engines = RayEngines(crew, deterministic=True)
    stuck = Requests(4, 0, [7], [2], [(1, 2, 3)], [()])
    engines.launch(0, stuck, slots=1, max_steps=8)
    with pytest.raises(EngineStalledError, match="no engine has made an engine step"):
        keep_ticking(engines)
    assert "sample 2 of prompt 7, on engine 0 for 1." in watch.file.read_text()


def test_an_error_in_a_worker_comes_with_its_own_traceback(lasting, tmp_path):
    watch = Watch(lasting, tmp_path)
    with pytest.raises(WorkerDiedError, match=r"worker 1 .* failed in update") as caught:
        watch.results(lasting.update("error"), is_steady=True)
    assert "no such row" in str(caught.value)
    assert str(watch.file) in str(caught.value)


def test_a_worker_out_of_memory_says_what_it_held_and_what_to_lower(lasting, tmp_path):
    """An allocation that fails. Fails when it is shown as any other traceback."""
    watch = Watch(lasting, tmp_path)
    with pytest.raises(WorkerMemoryError, match=r"worker 1 .* in update .*MemoryError") as caught:
        watch.results(lasting.update("no memory"), is_steady=True)
    assert "learner.max_tokens" in str(caught.value)
    assert "of its machine are free" in str(caught.value)
    assert watch.file.exists()


def test_a_killed_worker_is_blamed_and_not_the_one_whose_collective_breaks(group, tmp_path):
    """Rank 0 says that its peer has closed the connection. Fails when what it says is shown."""
    watch = Watch(group, tmp_path)
    group.meet(tmp_path)
    after(1, lambda: os.kill(group.pids[1], signal.SIGKILL))
    started = time.monotonic()
    with pytest.raises(WorkerDiedError, match=rf"worker 1 \(pid {group.pids[1]} on .* in update"):
        watch.results(group.update("stuck"), is_steady=True)
    assert time.monotonic() - started < 8
    assert "no stacks: the process is dead" in watch.file.read_text()


def test_a_dead_worker_is_blamed_also_when_only_another_one_was_called_and_failed(group, tmp_path):
    """Fails when the worker of the first failed call is the one at fault."""
    watch = Watch(group, tmp_path)
    os.kill(group.pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"worker 1 .* died in no call"):
        watch.results([group.actors[0].update.remote("error")])


def test_a_dead_worker_is_noticed_by_those_who_wait_for_another(group, tmp_path):
    """Nobody has called worker 1. Fails when liveness is only that of pending calls."""
    watch = Watch(group, tmp_path)
    after(0.5, lambda: os.kill(group.pids[1], signal.SIGKILL))
    started = time.monotonic()
    with pytest.raises(WorkerDiedError, match=r"worker 1 .*died in no call"):
        watch.results([group.actors[0].work.remote(60, 1.0)], is_steady=True)
    assert time.monotonic() - started < 8


def test_a_stopped_worker_is_noticed_and_ended_with_where_it_stood(group, tmp_path):
    """SIGSTOP: it answers nothing. Fails when its stacks are asked for without letting it go on, or
    when it is left stopped.
    """
    watch = Watch(group, tmp_path)
    after(1, lambda: os.kill(group.pids[1], signal.SIGSTOP))
    started = time.monotonic()
    with pytest.raises(WorkerStalledError, match=r"worker 1 .* is stopped"):
        watch.results(
            [group.actors[0].work.remote(60, 1.0), *group.update("stuck")[1:]], is_steady=True
        )
    assert time.monotonic() - started < 15
    report = watch.file.read_text()
    assert "stopped by a signal" in report
    assert "in wait_in_python" in report
    assert "waiting: worker 0 for worker 1" in report


def test_a_worker_stopped_without_notice_and_its_stopped_child_leave_no_process(group, tmp_path):
    """Nothing but SIGKILL ends them. Fails when the end is left to Ray, or is the workers' own."""
    child = ray.get(group.actors[0].start_child.remote())
    group.pids.append(child)
    watch = Watch(group, tmp_path)
    for pid in (child, group.pids[0]):
        os.kill(pid, signal.SIGSTOP)
    assert set(group.alive()) == {child, *group.pids}
    watch.end()
    group.wait_for_end()
    assert group.alive() == []


def test_a_worker_stuck_in_python_is_blamed_and_not_the_one_that_waits(group, tmp_path):
    """Rank 1 is one beat short of the collective. Fails when whoever is silent is blamed."""
    watch = Watch(group, tmp_path, stall_timeout_s=3.0)
    group.meet(tmp_path)
    started = time.monotonic()
    with pytest.raises(WorkerStalledError, match=r"worker 1 .*runtime\.stall_timeout_s = 3 s"):
        watch.results(group.update("stuck"), is_steady=True)
    assert time.monotonic() - started < 12
    report = watch.file.read_text()
    assert "waiting: worker 0 for worker 1" in report
    assert "in wait_in_python" in report
    assert "in all_reduce" in report


def test_a_killed_controller_leaves_no_worker_not_even_a_stopped_one(tmp_path):
    """SIGKILL: nothing of the controller runs any more. Fails when the end of workers is only its
    doing, or only their own.
    """
    script = (
        "import os, signal, sys, time\n"
        "from april_rl.runtime.cluster import start_ray\n"
        "from light_groups import Group\n"
        "start_ray(num_workers=2, address=None)\n"
        "group = Group()\n"
        "group.update('stuck')\n"
        "os.kill(group.pids[0], signal.SIGSTOP)\n"
        "print(*group.pids, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        workers = [psutil.Process(pid) for pid in pids]
        process.kill()
    assert len(workers) == 2
    _, alive = psutil.wait_procs(workers, timeout=15)
    assert not alive, [p.status() for p in alive]


def test_a_worker_of_another_node_is_watched_and_ended_by_that_node(tmp_path):
    """Two raylets. Fails when only processes of this machine's own node are looked at, when stacks
    and logs of the other one are not brought here, or when its workers seem silent because the
    process that watches them has ended; or when their end starts anew a Ray that has been left.
    """
    script = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "import psutil, pytest, ray\n"
        "from ray.cluster_utils import Cluster\n"
        "from april_rl.runtime.supervision.failures import WorkerStalledError\n"
        "from april_rl.runtime.cluster import start_ray\n"
        "from light_groups import Group, Watch\n"
        "head = {'num_cpus': 1, 'include_dashboard': False, 'object_store_memory': 10**8}\n"
        "cluster = Cluster(initialize_head=True, head_node_args=head)\n"
        "cluster.add_node(num_cpus=1, object_store_memory=10**8)\n"
        "start_ray(num_workers=2, address=cluster.address)\n"
        "group = Group(num_cpus=1)\n"
        "nodes = {member.node_id for member in group.members}\n"
        "watch = Watch(group, Path(sys.argv[1]), stall_timeout_s=10.0)\n"
        "here = ray.get_runtime_context().get_node_id()\n"
        "[far] = [r for r, m in enumerate(group.members) if m.node_id != here]\n"
        "watch.results([actor.work.remote(1, 3.0) for actor in group.actors])\n"
        "mine = psutil.Process().children(recursive=True)\n"
        "[sentry] = [p for p in mine if 'ray::Sentry' in ' '.join(p.cmdline())]\n"
        "sentry.kill()\n"
        "watch.results([actor.work.remote(26, 0.5) for actor in group.actors], is_steady=True)\n"
        "calls = [actor.work.remote(60, 1.0) for actor in group.actors]\n"
        "time.sleep(2)\n"
        "os.kill(group.pids[far], signal.SIGSTOP)\n"
        "with pytest.raises(WorkerStalledError, match=rf'worker {far} .* is stopped'):\n"
        "    watch.results(calls, is_steady=True)\n"
        "watch.end()\n"
        "group.wait_for_end()\n"
        "print(len(nodes), group.alive())\n"
        "ray.shutdown()\n"
        "watch.end()\n"
        "print('a Ray of its own:', ray.is_initialized())\n"
        "cluster.shutdown()\n"
    )
    done = run_alone(script, tmp_path)
    assert {"2 []", "a Ray of its own: False"} <= set(done.stdout.splitlines()), (
        done.stdout[-2000:] + done.stderr[-3000:]
    )
    report = (tmp_path / "stall_report.txt").read_text()
    assert "stopped by a signal" in report
    assert report.count("light_workers.py") >= 2, "the stacks of both"
