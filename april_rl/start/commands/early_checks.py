"""Checks that every command makes before it imports torch, so that mistakes are shown at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from april_rl.config import TrainConfig
from april_rl.config.user_code import Hook, check_args, check_named, signature_of
from april_rl.start.planning.model_folder import check_model_folder
from april_rl.start.planning.versions import check_versions
from april_rl.task.data.files import check_files
from april_rl.task.rewards.functions import RewardFunction, reward_functions
from april_rl.task.tiny.builtins import resolve_builtins


def check_early(
    config: TrainConfig, *, trains: bool = True, evaluates: bool = True, loads_model: bool = True
) -> TrainConfig:
    """Return the configuration with its builtin paths replaced. Raise RunError for a version that
    does not fit, a context that is too short, or a missing model, data file, column or user
    function. A command that does not train, or does not evaluate, skips the checks that only the
    other one needs; one that does not load the model accepts a folder that has only a tokenizer.
    """
    check_versions()
    from april_rl.start.planning.sizes import (
        context_length,  # it needs numpy, which --cfg job does not
    )

    sets = config.evaluation.sets if evaluates else {}
    counted = replace(config, evaluation=replace(config.evaluation, sets=sets))
    context_length(counted, is_training=trains)
    config = resolve_builtins(config)
    if loads_model:
        check_model_folder(config.model.path)
    for key, path in (("teacher.path", config.teacher.path), ("critic.path", config.critic.path)):
        if path and trains:
            check_model_folder(path, key=key)
    _check_functions(config, trains=trains)
    check_files(config, trains=trains, evaluates=evaluates, columns_of=_columns(config))
    return config


def _check_functions(config: TrainConfig, *, trains: bool) -> None:
    for key, function in _functions(config, trains=trains):
        if ":" not in function:
            continue  # a built-in
        Hook(key, function).call(partial(check_named, function), "cannot be loaded")


def _columns(config: TrainConfig) -> Callable[[str], set[str]]:
    """Return a function that names the columns of a data set that the user's reward functions take.
    Raise RunError if a function cannot take its `args`, or what this package passes to it.
    """
    taken = [
        (each, Hook(each.key, each.function).call(partial(_columns_of, each), "cannot be loaded"))
        for each in reward_functions(config.reward)
        if ":" in each.function
    ]
    return lambda name: {c for each, columns in taken if each.scores(name) for c in columns}


def _columns_of(function: RewardFunction) -> tuple[str, ...]:
    # It needs numpy, which --cfg job does not.
    from april_rl.task.rewards.loading import LISTS, Reward

    stub = signature_of(function.function)
    if stub is None:
        return ()
    check_args(stub, function.args, given=LISTS)
    return Reward(call=stub, args=function.args).columns


def _functions(config: TrainConfig, *, trains: bool) -> Iterator[tuple[str, str]]:
    for each in reward_functions(config.reward):
        yield each.key, each.function
    yield "environment.function", config.environment.function or ""
    if trains:
        algorithm = config.algorithm
        yield "algorithm.loss", algorithm.loss
        yield "algorithm.advantage", algorithm.advantage
        yield "algorithm.group_filter", algorithm.group_filter or ""
        yield "learner.age_weight", config.learner.age_weight or ""
        yield "data.sampler", config.data.sampler
