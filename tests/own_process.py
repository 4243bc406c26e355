"""Processes of a test: run a function in a new one, see whether one has ended, measure memory.

An engine that sleeps can be built only once per process.
"""

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

import psutil

_Given, _Result = ParamSpec("_Given"), TypeVar("_Result")


def in_own_process(
    function: Callable[_Given, _Result], *args: _Given.args, **kwargs: _Given.kwargs
) -> _Result:
    """Return what `function` returns in a new process, or raise its exception here."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args, **kwargs).result()


def is_running(pid: int) -> bool:
    """Return whether the process is running; a zombie does not count."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], *, within_s: float = 60.0) -> None:
    """Wait until `condition` holds; a busy machine needs several times as long as an idle one."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"it has not come true within {within_s:g} s"
        time.sleep(0.02)


@contextmanager
def peak_growth() -> Iterator[list[int]]:
    """Yield a list that gets the peak growth of this process's anonymous memory, in bytes."""
    seen, found, is_over = [_anonymous_bytes()], [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.001):
            seen.append(_anonymous_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    yield found
    is_over.set()
    watching.join()
    found[0] = max(seen) - seen[0]


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
