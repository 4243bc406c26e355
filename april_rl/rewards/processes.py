"""The processes of the reward pool: how they start, and how they end."""

from __future__ import annotations

import multiprocessing
from functools import partial

from pebble import ProcessPool

from april_rl.config.task import RewardConfig
from april_rl.errors import RunError
from april_rl.rewards.worker import GIB, MATH_VERIFY, Verdict, prepare_process

START_S = 60.0  # what a process may take to start and to import the function


class RewardError(RunError, RuntimeError):
    """No response can be scored, whatever it says; the run cannot go on."""


def fault(function: str, verdict: Verdict) -> RewardError:
    """The error to raise of a verdict that is not about the response."""
    if verdict.outcome == "refused":
        return RewardError(f"reward.function={function} {verdict.message}")
    return RewardError(
        "a reward process could not turn a response's token ids into text, before "
        f"reward.function={function} was called: {verdict.message}"
    )


def new_process_pool(
    reward: RewardConfig, *, decoder: bytes, num_processes: int | None = None
) -> ProcessPool:
    """Return processes that start with the first job, `reward.num_processes` unless given, each
    with `reward.memory_gib` of address space and what `decoder` is when unpickled: token ids to
    text.

    From a fork server: safe beside threads, and a replacement has math-verify loaded already.
    That server outlives the pool: it is one for the whole program and ends with it."""
    context = multiprocessing.get_context("forkserver")
    if reward.function == MATH_VERIFY:
        context.set_forkserver_preload(["april_rl.rewards.math_reward"])
    return ProcessPool(
        max_workers=num_processes or reward.num_processes,
        initializer=partial(
            prepare_process,
            reward.function,
            extract=reward.extract.value,
            soft_timeout_s=reward.soft_timeout_s,
            memory_bytes=int(reward.memory_gib * GIB),
            decoder=decoder,
        ),
        context=context,
    )


def stop(pool: ProcessPool) -> None:
    """End every process now, whatever it is doing."""
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()
