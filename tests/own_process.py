"""Processes of a test: run a function in a new one, and see whether one has ended.

An engine that sleeps can be built only once per process.
"""

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
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
