"""Workers that are killed, stopped, hung or out of memory are noticed in seconds, reported and
ended.

The tests use real Ray and real collectives over gloo, with workers that have neither model nor
engine.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import ray
from light_groups import Group, GroupWatchdog, run_alone
from own_process import is_running, wait_until
from source_tree import TESTS

from april_rl.errors import EngineStalledError
from april_rl.run.supervision.failures import WorkerDiedError, WorkerMemoryError, WorkerStalledError
from april_rl.run.supervision.watchdog import Watchdog
from april_rl.training.rollout.requests import Requests
from april_rl.training.runtime.cluster import start_ray, stop_ray
from april_rl.training.runtime.engines import RayEngines

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine]
# Half of the time that a call or a stall may take unless a test sets less; an idle machine takes 5.
IN_SECONDS = 30


@pytest.fixture(scope="module", autouse=True)
def embedded_ray() -> Iterator[None]:
    start_ray(num_workers=4, address=None)
    yield
    stop_ray()


@dataclass(kw_only=True)
class EngineGroup:
    """The part of `RayWorkers` that `RayEngines` uses."""

    engine_actors: list[list[object]]
    policy_version: int
    watchdog: Watchdog


@pytest.fixture(scope="module")
def shared_group() -> Group:
    """Return a group for tests that leave their workers unchanged."""
    return Group()


@pytest.fixture
def group(tmp_path) -> Iterator[Group]:
    """Return a group for a single test; check that no process is left."""
    new = Group()
    watchdog = GroupWatchdog(new, tmp_path)
    yield new
    watchdog.kill_workers()
    new.wait_for_end()
    assert not new.alive()


def after(seconds, act) -> None:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()


def keep_ticking(engines: RayEngines) -> None:
    while engines.wait(1.0):
        engines.launch(0, Requests(0), slots=1, max_steps=8)


def test_healthy_workers_give_results_and_no_report(shared_group, tmp_path):
    watchdog = GroupWatchdog(shared_group, tmp_path)
    assert watchdog.results(shared_group.update(), reports_beats=True) == [1, 1]
    assert not watchdog.file.exists()
    assert not watchdog.has_failed


def test_a_worker_that_makes_progress_may_take_as_long_as_it_needs(shared_group, tmp_path):
    watchdog = GroupWatchdog(shared_group, tmp_path, stall_timeout_s=2.0)
    assert watchdog.results([shared_group.actors[0].work.remote(8, 0.5)], reports_beats=True) == [8]


def test_a_call_without_beats_has_the_longer_limit(shared_group, tmp_path):
    watchdog = GroupWatchdog(shared_group, tmp_path, stall_timeout_s=1.0)
    assert watchdog.results([shared_group.actors[0].work.remote(1, 3.5)]) == [1]


def test_ticks_that_return_without_an_engine_step_are_a_stall(shared_group, tmp_path):
    """Every call returns at once. Fails when a result without a step counts as progress."""
    watchdog = GroupWatchdog(shared_group, tmp_path)
    workers = EngineGroup(
        engine_actors=[shared_group.actors[:1]], policy_version=0, watchdog=watchdog
    )
    engines = RayEngines(workers, deterministic=True)
    request = Requests(0, [7], [2], [(1, 2, 3)], [4], [()])
    engines.launch(0, request, slots=1, max_steps=8)
    with pytest.raises(EngineStalledError, match=r"no engine has made a step .* in flight: 1"):
        keep_ticking(engines)
    assert "no engine has made a step" in watchdog.file.read_text()


def test_an_error_in_a_worker_is_shown_with_its_traceback(shared_group, tmp_path):
    watchdog = GroupWatchdog(shared_group, tmp_path)
    with pytest.raises(WorkerDiedError, match=r"worker 1 .* failed in update") as caught:
        watchdog.results(shared_group.update("error"), reports_beats=True)
    assert "no such row" in str(caught.value)
    assert str(watchdog.file) in str(caught.value)


def test_a_failed_allocation_is_shown_with_memory_use_and_settings_to_lower(shared_group, tmp_path):
    watchdog = GroupWatchdog(shared_group, tmp_path)
    with pytest.raises(WorkerMemoryError, match=r"worker 1 .* in update .*MemoryError") as caught:
        watchdog.results(shared_group.update("no memory"), reports_beats=True)
    assert "learner.max_tokens" in str(caught.value)
    assert "its node has" in str(caught.value)
    assert watchdog.file.exists()


def test_a_killed_worker_is_blamed_and_not_the_one_whose_collective_breaks(group, tmp_path):
    """Rank 0 fails because its peer closed the connection. Fails when that error is shown."""
    watchdog = GroupWatchdog(group, tmp_path)
    group.join(tmp_path)
    after(1, lambda: os.kill(group.pids[1], signal.SIGKILL))
    started = time.monotonic()
    with pytest.raises(WorkerDiedError, match=rf"worker 1 \(pid {group.pids[1]} on .* in update"):
        watchdog.results(group.update("hang"), reports_beats=True)
    assert time.monotonic() - started < IN_SECONDS
    assert "no stacks: the process is dead" in watchdog.file.read_text()


def test_a_crash_in_native_code_is_reported_with_the_end_of_the_workers_log(group, tmp_path):
    """Ray says that the process may have run out of memory. Fails when the report lacks its stderr,
    where Python has written the stack.
    """
    watchdog = GroupWatchdog(group, tmp_path)
    with pytest.raises(WorkerDiedError, match=r"worker 1 .* died in update"):
        watchdog.results(group.update("crash"), reports_beats=True)
    report = watchdog.file.read_text()
    assert "Segmentation fault" in report
    assert "in crash_in_native_code" in report


def test_a_dead_worker_is_noticed_while_waiting_for_another_one(group, tmp_path):
    """No call to worker 1 is open. Fails when only called workers are checked."""
    watchdog = GroupWatchdog(group, tmp_path)
    after(0.5, lambda: os.kill(group.pids[1], signal.SIGKILL))
    started = time.monotonic()
    with pytest.raises(WorkerDiedError, match=r"worker 1 .*died before its first call"):
        watchdog.results([group.actors[0].work.remote(60, 1.0)], reports_beats=True)
    assert time.monotonic() - started < IN_SECONDS


def test_a_stopped_worker_is_noticed_in_seconds_and_its_stacks_are_in_the_report(group, tmp_path):
    """After SIGSTOP it answers nothing. Fails when its stacks are requested without letting it
    continue, or when it is left stopped.
    """
    watchdog = GroupWatchdog(group, tmp_path)
    after(1, lambda: os.kill(group.pids[1], signal.SIGSTOP))
    started = time.monotonic()
    with pytest.raises(WorkerStalledError, match=r"worker 1 .* was stopped"):
        watchdog.results(
            [group.actors[0].work.remote(60, 1.0), *group.update("hang")[1:]], reports_beats=True
        )
    assert time.monotonic() - started < IN_SECONDS
    report = watchdog.file.read_text()
    assert "stopped by a signal" in report
    assert "in wait_in_python" in report
    assert "waiting: worker 0 waits for worker 1" in report


def test_a_stopped_worker_and_its_stopped_child_leave_no_process(group, tmp_path):
    """Only SIGKILL ends them. Fails when that is left to Ray, or to the workers themselves."""
    child = ray.get(group.actors[0].start_child.remote())
    group.pids.append(child)
    watchdog = GroupWatchdog(group, tmp_path)
    for pid in (child, group.pids[0]):
        os.kill(pid, signal.SIGSTOP)
    assert set(group.alive()) == {child, *group.pids}
    watchdog.kill_workers()
    group.wait_for_end()
    assert group.alive() == []


def test_a_worker_that_hangs_is_blamed_and_not_the_one_that_waits_for_it(group, tmp_path):
    """Rank 1 is one beat behind. Fails when any worker without progress may be blamed."""
    watchdog = GroupWatchdog(group, tmp_path, stall_timeout_s=3.0)
    group.join(tmp_path)
    started = time.monotonic()
    with pytest.raises(WorkerStalledError, match=r"worker 1 .*runtime\.stall_timeout_s = 3 s"):
        watchdog.results(group.update("hang"), reports_beats=True)
    assert time.monotonic() - started < IN_SECONDS
    report = watchdog.file.read_text()
    assert "waiting: worker 0 waits for worker 1" in report
    assert "in wait_in_python" in report
    assert "in all_reduce" in report


def test_a_killed_controller_leaves_no_worker_not_even_a_stopped_one(tmp_path):
    """After SIGKILL the controller cannot clean up. Fails when workers are ended only by the
    controller, or only by themselves.
    """
    script = (
        "import os, signal, sys, time\n"
        "from april_rl.training.runtime.cluster import start_ray\n"
        "from light_groups import Group\n"
        "start_ray(num_workers=2, address=None)\n"
        "group = Group()\n"
        "group.update('hang')\n"
        "os.kill(group.pids[0], signal.SIGSTOP)\n"
        "print(*group.pids, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        process.kill()
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.soak
def test_a_worker_on_another_node_is_watched_and_ended_through_that_nodes_monitor(tmp_path):
    """With two raylets. Fails when only the local node's workers are watched; when stacks and logs
    of the other node are missing; when a monitor that was killed and restarted looks like a stall;
    or when cleaning up after Ray has shut down starts Ray again.
    """
    script = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "import psutil, pytest, ray\n"
        "from ray.cluster_utils import Cluster\n"
        "from april_rl.run.supervision.failures import WorkerStalledError\n"
        "from april_rl.training.runtime.cluster import start_ray\n"
        "from light_groups import Group, GroupWatchdog\n"
        "head = {'num_cpus': 1, 'include_dashboard': False, 'object_store_memory': 10**8}\n"
        "cluster = Cluster(initialize_head=True, head_node_args=head)\n"
        "cluster.add_node(num_cpus=1, object_store_memory=10**8)\n"
        "start_ray(num_workers=2, address=cluster.address)\n"
        "group = Group(num_cpus=1)\n"
        "nodes = {process.node_id for process in group.processes}\n"
        "watchdog = GroupWatchdog(group, Path(sys.argv[1]), stall_timeout_s=10.0)\n"
        "here = ray.get_runtime_context().get_node_id()\n"
        "[far] = [r for r, p in enumerate(group.processes) if p.node_id != here]\n"
        "watchdog.results([actor.work.remote(1, 3.0) for actor in group.actors])\n"
        "mine = psutil.Process().children(recursive=True)\n"
        "[monitor] = [p for p in mine if 'ray::NodeMonitor' in ' '.join(p.cmdline())]\n"
        "monitor.kill()\n"
        "calls = [actor.work.remote(26, 0.5) for actor in group.actors]\n"
        "watchdog.results(calls, reports_beats=True)\n"
        "calls = [actor.work.remote(60, 1.0) for actor in group.actors]\n"
        "time.sleep(2)\n"
        "os.kill(group.pids[far], signal.SIGSTOP)\n"
        "with pytest.raises(WorkerStalledError, match=rf'worker {far} .* was stopped'):\n"
        "    watchdog.results(calls, reports_beats=True)\n"
        "watchdog.kill_workers()\n"
        "group.wait_for_end()\n"
        "print(len(nodes), group.alive())\n"
        "ray.shutdown()\n"
        "watchdog.kill_workers()\n"
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
