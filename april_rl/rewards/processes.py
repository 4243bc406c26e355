"""The processes of the reward pool: how they start, and how they end."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from pebble import ProcessPool

from april_rl.config.task import RewardConfig
from april_rl.errors import RunError
from april_rl.rewards.caught import GIB
from april_rl.rewards.functions import (
    BUILTIN_MODULES,
    MATH_VERIFY,
    RewardFunction,
    reward_functions,
)
from april_rl.rewards.jobs import Verdict
from april_rl.rewards.loading import Context
from april_rl.rewards.worker import prepare_process


class RewardError(RunError, RuntimeError):
    """No response can be scored, whatever it says; the run cannot go on."""


def fault(functions: Iterable[RewardFunction], verdict: Verdict) -> RewardError:
    """Return the error to raise of a verdict that is not about the response."""
    named = {function.name: function for function in functions}
    if verdict.outcome == "refused":
        return RewardError(f"{named.get(verdict.name, 'reward.function')} {verdict.message}")
    return RewardError(
        "a reward process could not turn a response's token ids into text, before "
        f"{' or '.join(map(str, named.values()))} was called: {verdict.message}"
    )


def new_process_pool(
    reward: RewardConfig,
    *,
    decoder: bytes,
    folder: Path | None,
    num_processes: int | None = None,
) -> ProcessPool:
    """Return processes that start with the first job, `reward.num_processes` unless given, each
    with `reward.memory_gib` of address space and what `decoder` is when unpickled: token ids to
    text. `folder` is the run directory.

    From a fork server: safe beside threads, and a replacement has math-verify loaded already.
    That server outlives the pool: it is one for the whole program and ends with it."""
    functions = reward_functions(reward)
    context = multiprocessing.get_context("forkserver")
    if any(function.function == MATH_VERIFY for function in functions):
        context.set_forkserver_preload([BUILTIN_MODULES[MATH_VERIFY]])
    return ProcessPool(
        max_workers=num_processes or reward.num_processes,
        initializer=partial(
            prepare_process,
            functions,
            context=Context(
                extract=reward.extract.value,
                soft_timeout_s=reward.soft_timeout_s,
                hard_timeout_s=reward.hard_timeout_s,
                folder=folder,
            ),
            memory_bytes=int(reward.memory_gib * GIB),
            decoder=decoder,
        ),
        context=context,
    )


def stop(pool: ProcessPool) -> None:
    """End every process now, whatever it is doing."""
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()
