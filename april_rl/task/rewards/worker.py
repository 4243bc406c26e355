"""The work of a reward process, from loading to scores; a RewardError reaches the controller."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from april_rl.config.runtime import UserCodeConfig
from april_rl.config.task import RewardConfig
from april_rl.config.user_code import Caught, memory_gib
from april_rl.task.processes.child_process import prepare
from april_rl.task.rewards.functions import RewardFunction, keys_of, reward_functions
from april_rl.task.rewards.jobs import About, DecodedJob, Job, Result, RewardError
from april_rl.task.rewards.loading import Reward, RewardContext, load_reward
from april_rl.types import Score

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Everything that a reward process loads before its first job."""

    rewards: tuple[tuple[RewardFunction, Reward], ...]
    decode: Decode


# What this process has loaded, or why it failed. Global, because the pool calls plain functions.
loaded: Loaded | str = "a reward process has not loaded any function"


def prepare_process(
    reward: RewardConfig,
    limits: UserCodeConfig,
    *,
    decoder: bytes,
    folder: Path | None,
    states: Mapping[str, str],
    lifeline: Connection,
) -> None:
    """Set the limits of a reward process and load everything; `decoder` is a pickled `Decode`,
    `folder` the run directory, `states` the states to continue from, by function.
    """
    global loaded
    functions = reward_functions(reward)
    os.setsid()  # a reward that kills the group of a program that it started ends only itself
    prepare(lifeline, limits, keys=keys_of(functions))
    context = RewardContext(
        extract=reward.extract.value,
        soft_timeout_s=reward.soft_timeout_s,
        hard_timeout_s=reward.hard_timeout_s,
        num_processes=reward.num_processes,
        folder=folder,
    )
    found: list[tuple[RewardFunction, Reward]] = []
    for function in functions:
        with Caught() as caught:
            state = states.get(function.name)
            found.append((function, load_reward(function, context, state=state)))
        if caught.message:
            loaded = f"{function} cannot be loaded: {caught.message}"
            return
    with Caught() as caught:
        loaded = Loaded(rewards=tuple(found), decode=pickle.loads(decoder))
    if caught.message:
        # A library that does not fit into memory may raise an error that does not mention memory.
        memory = f"user_code.memory_gib = {memory_gib():g}"
        message = f"the tokenizer cannot be loaded with {memory}: {caught.message}"
        loaded = str(_decoding_error(functions, message))


def score(job: Job) -> Result:
    """Return the scores of each response of a job by each function [n], and their states."""
    ready = _get_loaded()
    with Caught() as caught:
        texts = [ready.decode(token_ids) for token_ids in job.token_ids]
    if caught.message:
        raise _decoding_error((function for function, _ in ready.rewards), caught.message)
    decoded = DecodedJob(
        prompt=job.prompt,
        sample_ids=job.sample_ids,
        texts=texts,
        num_tokens=[len(token_ids) for token_ids in job.token_ids],
        truncated=job.truncated,
        environment_rewards=job.environment_rewards,
    )
    return _result(ready, decoded, [job.whole_group])


def try_on(job: DecodedJob, function: str | None = None) -> list[list[Score]]:
    """Return scores of responses given as texts; a reward's state is the same afterwards."""
    ready = _get_loaded()
    if function is not None:
        chosen = tuple(pair for pair in ready.rewards if pair[0].function == function)
        ready = replace(ready, rewards=chosen)
    states = [reward.state for _, reward in ready.rewards]
    scores = _result(ready, job, [False, True]).scores
    for (settings, reward), state in zip(ready.rewards, states, strict=True):
        with Caught() as caught:
            if state is not None:
                reward.restore(state)
        if caught.message:
            raise RewardError(f"{settings} cannot restore what it saved: {caught.message}")
    return scores


def about_rewards() -> dict[str, About]:
    return {
        function.name: About(reward.columns, reward.note)
        for function, reward in _get_loaded().rewards
    }


def _get_loaded() -> Loaded:
    if isinstance(loaded, str):
        raise RewardError(loaded)
    return loaded


def _decoding_error(functions: Iterable[RewardFunction], message: str) -> RewardError:
    return RewardError(
        "a reward process could not turn a response's token ids into text, before calling "
        f"{' or '.join(map(str, functions))}: {message}"
    )


def _result(loaded: Loaded, job: DecodedJob, whole_groups: Sequence[bool]) -> Result:
    called = [
        (function, reward)
        for function, reward in loaded.rewards
        if function.wants_group in whole_groups
        if function.scores(job.prompt.dataset)
    ]
    scores = [reward.scores(function, job) for function, reward in called]
    return Result(
        scores=[list(of_response) for of_response in zip(*scores, strict=True)],
        states={f.name: reward.state for f, reward in called if reward.state is not None},
    )
