"""Starts and stops the processes of the reward pool."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from pebble import ProcessPool

from april_rl.config.task import RewardConfig
from april_rl.rewards.child_process import lifeline
from april_rl.rewards.functions import MATH_VERIFY, RewardFunction, builtin_module, reward_functions
from april_rl.rewards.loading import Context
from april_rl.rewards.plugins import GIB
from april_rl.rewards.worker import prepare_process


def new_process_pool(
    reward: RewardConfig,
    *,
    decoder: bytes,
    folder: Path | None,
    states: Mapping[str, str],
) -> ProcessPool:
    """Return a pool whose processes start with the first job.

    There are `reward.num_processes`, each with `reward.memory_gib` of memory.
    `decoder` is a pickled function from token ids to text; `folder` is the run directory. A process
    continues from what `states` holds when it starts, by function.

    Processes come from a fork server: that is safe beside threads, and a replacement has
    math-verify loaded already. The server is shared by the whole program and ends with it.
    """
    functions = reward_functions(reward)
    context = multiprocessing.get_context("forkserver")
    if any(function.function == MATH_VERIFY for function in functions):
        context.set_forkserver_preload([builtin_module(MATH_VERIFY)])
    return ProcessPool(
        max_workers=reward.num_processes,
        initializer=partial(
            prepare_process,
            functions,
            context=Context(
                extract=reward.extract.value,
                soft_timeout_s=reward.soft_timeout_s,
                hard_timeout_s=reward.hard_timeout_s,
                num_processes=reward.num_processes,
                folder=folder,
            ),
            memory_bytes=int(reward.memory_gib * GIB),
            decoder=decoder,
            states=states,
            secrets={*reward.secrets, *_keys(functions)},
            lifeline=lifeline(),
        ),
        context=context,
    )


def _keys(functions: Iterable[RewardFunction]) -> Iterator[str]:
    """Yield the environment variables with keys that the arguments of functions name, and those
    with which a reward model is read from the hub.
    """
    for function in functions:
        if isinstance(name := function.args.get("api_key_env"), str):
            yield name
        if function.function == "reward_model":
            yield from ("HF_TOKEN", "HF_TOKEN_PATH")


def stop(pool: ProcessPool) -> None:
    """End every process now, whatever it is doing."""
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()
