"""The processes of the reward pool: how they start, and how they end."""

from __future__ import annotations

import multiprocessing

from pebble import ProcessPool

from april_rl.errors import RunError
from april_rl.rewards.worker import GIB, MATH_VERIFY, prepare_process

START_S = 60.0  # what a process may take to start and to import the function


class RewardError(RunError, RuntimeError):
    """The reward function is at fault, whatever the response; the run cannot go on."""


def new_process_pool(
    function: str, *, num_processes: int, soft_timeout_s: float, memory_gib: float
) -> ProcessPool:
    """Processes that start with the first job, each with `memory_gib` of address space.

    From a fork server: safe beside threads, and a replacement has math-verify loaded already.
    That server outlives the pool: it is one for the whole program and ends with it."""
    context = multiprocessing.get_context("forkserver")
    if function == MATH_VERIFY:
        context.set_forkserver_preload(["april_rl.rewards.math_reward"])
    return ProcessPool(
        max_workers=num_processes,
        initializer=prepare_process,
        initargs=(function, soft_timeout_s, int(memory_gib * GIB)),
        context=context,
    )


def stop(pool: ProcessPool) -> None:
    """End every process now, whatever it is doing."""
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()
