"""Advantages and a group filter of the user's; a loss is in `learner/own_loss.py`.

Each is called as the built-in ones are, with the arguments of `algorithm.args` that it names. What
it returns is checked at every call, so that a wrong shape ends the run and trains nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from april_rl.algorithm.advantages import Advantages, Floats
from april_rl.config.algorithm import AlgorithmConfig
from april_rl.config.choices import Advantage
from april_rl.errors import RunError
from april_rl.outside.user_code import Caught, import_function
from april_rl.types import Sample, ScoredGroup

GroupFilter = Callable[[ScoredGroup], bool]


class OwnFunctionError(RunError):
    """A user's function of the algorithm cannot be used, or returned an invalid value."""


def load_advantages(config: AlgorithmConfig) -> Advantages | None:
    """Return the function of algorithm.advantage, None if built in; raise OwnFunctionError."""
    if config.advantage in Advantage.__members__:
        return None
    estimate = load_own(config, "advantage", config.advantage, num_given=2)

    def checked(
        groups: Sequence[ScoredGroup], rewards: Sequence[ArrayLike]
    ) -> Sequence[Sequence[float | Floats]]:
        wrong, found = "", []
        samples = [scored.group.samples for scored in groups]
        with Caught() as caught:
            returned = estimate(samples, rewards)
            found = [[np.asarray(each, np.float64) for each in group] for group in returned]
            wrong = _wrong_advantages(samples, found)
        if message := caught.message or wrong:
            raise OwnFunctionError(f"algorithm.advantage={config.advantage}: {message}")
        return [[each if each.ndim else float(each) for each in group] for group in found]

    return checked


def load_group_filter(config: AlgorithmConfig) -> GroupFilter | None:
    """Return the function of algorithm.group_filter, None without one; raise OwnFunctionError."""
    if config.group_filter is None:
        return None
    keep = load_own(config, "group_filter", config.group_filter, num_given=1)

    def checked(scored: ScoredGroup) -> bool:
        with Caught() as caught:
            return bool(keep(scored))
        raise OwnFunctionError(f"algorithm.group_filter={config.group_filter}: {caught.message}")

    return checked


def load_own(
    config: AlgorithmConfig, key: str, function: str, *, num_given: int
) -> Callable[..., Any]:
    """Import a function, and bind the arguments of `algorithm.args` that it names."""
    with Caught() as caught:
        found = import_function(function)
        args = {name: config.args[name] for name in keywords(found) & config.args.keys()}
        inspect.signature(found).bind(*range(num_given), **args)
        return partial(found, **args)
    raise OwnFunctionError(f"algorithm.{key}={function} cannot be used: {caught.message}")


def keywords(function: Callable[..., Any]) -> set[str]:
    """Return the names of the arguments that `algorithm.args` may set: those after the `*`."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}


def _wrong_advantages(
    samples: Sequence[Sequence[Sample]], found: Sequence[Sequence[Floats]]
) -> str:
    if [len(group) for group in found] != [len(group) for group in samples]:
        return (
            f"it returned {[len(group) for group in found]} advantages for groups of "
            f"{[len(group) for group in samples]} samples; return one list for each group"
        )
    for group, advantages in zip(samples, found, strict=True):
        for sample, each in zip(group, advantages, strict=True):
            if each.ndim and each.shape != (sample.num_tokens,):
                return (
                    f"it returned an array of shape {list(each.shape)} for a sample of "
                    f"{sample.num_tokens} response tokens; return a number or one for each token"
                )
            if not np.isfinite(each).all():
                return "it returned an advantage that is not a finite number"
    return ""
