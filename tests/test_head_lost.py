"""The end of Ray's head process (gcs_server): noticed, told, and the run cleaned up after it."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import psutil
import pytest
from light_groups import run_alone
from scenes import UNMET, scene, vitals

from april_rl.runtime.supervision.diagnosis import head_lost
from april_rl.runtime.supervision.ray_head import Head

MANY = 10  # looks, more than it takes


class Wanderer:
    """An address, now of somebody who listens, now of nobody, now of one who does not answer."""

    def __init__(self, stack: ExitStack) -> None:
        self.open = stack.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
        self.refusing = stack.enter_context(closing(socket.socket()))
        self.refusing.bind(("127.0.0.1", 0))  # and nobody listens
        self.full = stack.enter_context(closing(socket.create_server(("127.0.0.1", 0), backlog=0)))
        for _ in range(3):  # as many as the kernel keeps for one that accepts none, and more
            waiting = stack.enter_context(closing(socket.socket()))
            waiting.setblocking(False)
            waiting.connect_ex(self.full.getsockname())
        self._now = self.open
        self.head = Head(lambda: "{}:{}".format(*self._now.getsockname()))

    def look(self, where: socket.socket, times: int) -> bool:
        """So many looks there; whether the head is lost then."""
        self._now = where
        for _ in range(times):
            self.head.look()
        return self.head.is_lost


@pytest.fixture
def wanderer() -> Iterator[Wanderer]:
    with ExitStack() as stack:
        yield Wanderer(stack)


def test_a_head_is_lost_when_it_listened_and_some_looks_in_a_row_were_refused(wanderer):
    """Fails when one refusal is enough, or refusals count that were long ago."""
    assert not wanderer.look(wanderer.open, MANY)
    assert not wanderer.look(wanderer.refusing, 4)
    assert not wanderer.look(wanderer.open, 1)
    assert not wanderer.look(wanderer.refusing, 4)
    assert wanderer.look(wanderer.refusing, 1)
    assert not wanderer.head.listens()


def test_a_head_that_does_not_answer_is_not_lost(wanderer):
    """It may be busy, or the network slow. Fails when whatever is no answer is a refusal, or
    refusals are counted that were not in a row.
    """
    wanderer.look(wanderer.open, 1)
    assert wanderer.head.listens()
    assert not wanderer.look(wanderer.full, MANY)
    assert not wanderer.head.listens()
    wanderer.look(wanderer.refusing, 4)
    wanderer.look(wanderer.full, 1)
    assert not wanderer.look(wanderer.refusing, 4)


def test_nobody_is_lost_where_nobody_was_ever_seen_to_listen(wanderer):
    """An address that cannot be reached from here, say. Fails when refusals alone count."""
    assert not wanderer.look(wanderer.refusing, MANY)


def test_the_error_says_what_has_ended_and_what_to_do():
    """Before workers are met too. Fails when kills for want of memory are told of none."""
    said = str(head_lost(UNMET, "10.0.0.1:6379"))
    assert said.startswith("Ray's head process (gcs_server at 10.0.0.1:6379) has ended")
    assert "Start the run again" in said
    assert "memory" not in said
    assert "memory beside the workers: 2)" in str(head_lost(scene(vitals(), oom_kills=2), "a:1"))


SCRIPT = """
import sys, time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
import psutil, ray
from april_rl.errors import RunError
from april_rl.runtime.cluster import start_ray
from april_rl.runtime.layout import Layout
from april_rl.runtime.workers import Workers
from light_groups import Group, Watch
start_ray(num_workers=1, address=None)
group = Group()
watch = Watch(group, Path(sys.argv[1]))
layout = Layout(device="cpu", num_workers=1, tensor_parallel_size=1)
settings = SimpleNamespace(device="cpu", threads=1)
workers = Workers(layout, settings=settings, address=None, watchdog=watch)
workers.memory()
[head], [raylet] = [
    [process for process in psutil.Process().children() if process.name() == name]
    for name in ("gcs_server", "raylet")
]
if IS_ALONE:
    ray.get(group.actors[0].start_child.remote())
    head.suspend()
    watch.results([group.actors[0].work.remote(7, 1.0)], is_steady=True)
    head.resume()
print(*[process.pid for process in psutil.Process().children(recursive=True)])
started = time.monotonic()
for process in [head] if IS_ALONE else [head, raylet]:
    process.kill()
try:
    with closing(workers):
        try:
            watch.results([a.work.remote(60, 1.0) for a in group.actors], is_steady=True)
        finally:
            print(time.monotonic() - started)
except RunError as error:
    print(time.monotonic() - started)
    sys.exit(f"error: {error}")
"""


def lost(folder: Path, *, is_alone: bool) -> tuple[str, list[int]]:
    """What a run says whose head process is killed, alone or with its node's raylet, once it has
    ended, in time; and the processes that it had.
    """
    done = run_alone(f"IS_ALONE = {is_alone}\n{SCRIPT}", folder)
    assert done.returncode == 1
    assert done.stdout.count("\n") == 3, done.stderr[-3000:]
    pids, noticed_s, ended_s = done.stdout.splitlines()
    assert float(noticed_s) < 15
    assert float(ended_s) < 40, "Ray ends the process after 60 s"
    return done.stderr, [int(pid) for pid in pids.split()]


def alive(pids: Iterable[int]) -> Iterator[psutil.Process]:
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process


@pytest.mark.slow
@pytest.mark.cpu_engine
def test_a_run_whose_head_process_is_killed_ends_with_one_message_and_no_process(tmp_path):
    """It was stopped for some seconds before. Fails when a head that is only slow is taken for
    dead; when the end is left to Ray, which takes a minute and says nothing of use; when cleaning
    up asks a Ray that cannot answer; or when anything of Ray or of the workers is left.
    """
    said, pids = lost(tmp_path, is_alone=True)
    [message, _] = said.splitlines()
    assert message.startswith("error: Ray's head process (gcs_server at ")
    assert "in work" in (tmp_path / "stall_report.txt").read_text()
    deadline = time.monotonic() + 4
    while left := list(alive(pids)):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.cpu_engine
def test_where_the_workers_end_with_the_head_process_cleaning_up_does_not_hang(tmp_path):
    """As after `ray stop`. Fails when only a lost head that was blamed is left alone."""
    said, _ = lost(tmp_path, is_alone=False)
    assert re.search(r"^error: worker \d \(pid \d+ on .* died in ", said, re.M), said
