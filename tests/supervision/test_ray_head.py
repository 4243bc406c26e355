"""When Ray's head process (gcs_server) ends, the run notices it, says so, and leaves no process."""

import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from cluster_snapshots import BEFORE_START, snapshot, status
from light_groups import run_alone
from own_process import is_running, wait_until

from april_rl.supervision.diagnosis import ray_head_error
from april_rl.supervision.ray_head import RayHead

MANY = 10  # more checks than are needed


class MovingAddress:
    """An address with a listening process, without one, or with one that does not accept
    connections.
    """

    def __init__(self, stack: ExitStack) -> None:
        self.listening = stack.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
        self.refusing = stack.enter_context(closing(socket.socket()))
        self.refusing.bind(("127.0.0.1", 0))  # no process listens there
        self.full = stack.enter_context(closing(socket.create_server(("127.0.0.1", 0), backlog=0)))
        for _ in range(3):  # more connections than the kernel keeps waiting
            waiting = stack.enter_context(closing(socket.socket()))
            waiting.setblocking(False)
            waiting.connect_ex(self.full.getsockname())
        self._now = self.listening
        self.head = RayHead(lambda: "{}:{}".format(*self._now.getsockname()))

    def check(self, where: socket.socket, times: int) -> bool:
        """Check `times` times at an address; return whether the head is lost then."""
        self._now = where
        for _ in range(times):
            self.head.check()
        return self.head.is_lost


@pytest.fixture
def address() -> Iterator[MovingAddress]:
    with ExitStack() as stack:
        yield MovingAddress(stack)


def test_a_head_is_lost_after_consecutive_refusals_where_it_once_listened(address):
    """Fails when one refusal is enough, or when refusals count that were not consecutive."""
    assert not address.check(address.listening, MANY)
    assert not address.check(address.refusing, 4)
    assert not address.check(address.listening, 1)
    assert not address.check(address.refusing, 4)
    assert address.check(address.refusing, 1)
    assert not address.head.is_listening()


def test_a_head_that_does_not_answer_is_not_lost(address):
    """It may be busy, or the network slow. Fails when every missing reply counts as a refusal, or
    when refusals before a missing reply still count.
    """
    address.check(address.listening, 1)
    assert address.head.is_listening()
    assert not address.check(address.full, MANY)
    assert not address.head.is_listening()
    address.check(address.refusing, 4)
    address.check(address.full, 1)
    assert not address.check(address.refusing, 4)


def test_a_head_that_never_replied_is_not_lost(address):
    """Its address may be unreachable from here. Fails when refusals are enough."""
    assert not address.check(address.refusing, MANY)


def test_the_error_names_the_process_that_ended_and_the_remedy():
    """Even before workers are watched. Fails when it mentions memory although no process was killed
    for it.
    """
    message = str(ray_head_error(BEFORE_START, "10.0.0.1:6379"))
    assert message.startswith("Ray's head process (gcs_server at 10.0.0.1:6379) has ended")
    assert "Start the run again" in message
    assert "memory" not in message
    killed = str(ray_head_error(snapshot(status(oom_kills=2)), "a:1"))
    assert "(the kernel killed 2 processes for lack of memory)" in killed


SCRIPT = """
import sys, time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
import psutil, ray
from april_rl.errors import RunError
from april_rl.runtime.cluster import start_ray
from april_rl.planning.layout import Layout
from april_rl.runtime.workers import Workers
from light_groups import Group, GroupWatchdog
start_ray(num_workers=1, address=None)
group = Group()
watchdog = GroupWatchdog(group, Path(sys.argv[1]))
layout = Layout(device="cpu", num_workers=1, tensor_parallel_size=1)
settings = SimpleNamespace(device="cpu", threads=1)
workers = Workers(layout, settings=settings, address=None, watchdog=watchdog)
workers.memory()
[head], [raylet] = [
    [process for process in psutil.Process().children() if process.name() == name]
    for name in ("gcs_server", "raylet")
]
if IS_ALONE:
    ray.get(group.actors[0].start_child.remote())
    head.suspend()
    watchdog.results([group.actors[0].work.remote(7, 1.0)], reports_beats=True)
    head.resume()
print(*[process.pid for process in psutil.Process().children(recursive=True)])
started = time.monotonic()
for process in [head] if IS_ALONE else [head, raylet]:
    process.kill()
try:
    with closing(workers):
        try:
            watchdog.results([a.work.remote(60, 1.0) for a in group.actors], reports_beats=True)
        finally:
            print(time.monotonic() - started)
except RunError as error:
    print(time.monotonic() - started)
    sys.exit(f"error: {error}")
"""


def run_and_kill_head(folder: Path, *, is_alone: bool) -> tuple[str, list[int]]:
    """Kill the head process of a run, with or without its node's raylet, and check that the run
    ends in time. Return its stderr and the pids of its processes.
    """
    done = run_alone(f"IS_ALONE = {is_alone}\n{SCRIPT}", folder)
    assert done.returncode == 1
    assert done.stdout.count("\n") == 3, done.stderr[-3000:]
    pids, noticed_s, ended_s = done.stdout.splitlines()
    assert float(noticed_s) < 15
    assert float(ended_s) < 40, "Ray ends the process after 60 s"
    return done.stderr, [int(pid) for pid in pids.split()]


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.cpu_engine
def test_a_run_whose_head_process_is_killed_ends_with_one_message_and_no_process(tmp_path):
    """The head process was suspended for some seconds before. Fails when a slow head counts as
    dead; when the end is left to Ray, which takes a minute and gives no reason; when cleaning up
    waits for Ray; or when a process of Ray or of a worker is left.
    """
    stderr, pids = run_and_kill_head(tmp_path, is_alone=True)
    [message, _] = stderr.splitlines()
    assert message.startswith("error: Ray's head process (gcs_server at ")
    assert "in work" in (tmp_path / "stall_report.txt").read_text()
    wait_until(lambda: not any(map(is_running, pids)), within_s=15)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.cpu_engine
def test_cleaning_up_does_not_hang_when_head_process_and_workers_end_together(tmp_path):
    """This happens after `ray stop`. Fails when cleaning up calls Ray unless the head
    was blamed.
    """
    stderr, _ = run_and_kill_head(tmp_path, is_alone=False)
    assert re.search(r"^error: worker \d \(pid \d+ on .* died (in|before|after) ", stderr, re.M), (
        stderr
    )
