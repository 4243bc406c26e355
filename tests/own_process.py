"""Run a function in a new process: an engine that sleeps can be built only once per process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

_Given, _Result = ParamSpec("_Given"), TypeVar("_Result")


def in_own_process(
    function: Callable[_Given, _Result], *args: _Given.args, **kwargs: _Given.kwargs
) -> _Result:
    """Return what `function` returns in a new process; what it raises is raised here."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args, **kwargs).result()
