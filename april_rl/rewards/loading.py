"""Turns a setting into a function that scores responses, in a reward process."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Set
from dataclasses import dataclass, replace
from functools import cache
from numbers import Real
from pathlib import Path

from april_rl.rewards.functions import BUILTIN_MODULES, RewardFunction
from april_rl.rewards.jobs import Responses, Verdict
from april_rl.rewards.plugins import Caught, import_function

RESERVED = ("num_tokens", "truncated", "datasets")
NUM_LISTS = 3  # prompts, responses, answers: what every function gets
Reward = Callable[..., object]
Scorer = Callable[[Responses], list[Verdict]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a built-in may need from the run besides its own arguments."""

    extract: str  # reward.extract
    soft_timeout_s: float
    hard_timeout_s: float
    folder: Path | None  # the run directory; None outside a run


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A built-in reward function with its arguments filled in."""

    reward: Reward
    columns: tuple[str, ...] = ()  # data columns it gets besides those in its signature
    note: str = ""  # shown to the user before training starts
    last_failure: Callable[[], str] = str  # why it had no score the last time


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltScorer:
    """A built-in that returns whole verdicts, not only numbers."""

    scorer: Scorer


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedFunction:
    """A reward function that is ready to be called."""

    settings: RewardFunction
    scorer: Scorer
    columns: tuple[str, ...] = ()  # data columns it asks for
    note: str = ""  # shown to the user


def load_function(settings: RewardFunction, context: Context) -> LoadedFunction:
    """Import a reward function, or build a built-in with its arguments.

    Raise TypeError when it does not accept what the settings give it, and whatever the import
    raises.
    """
    if settings.function not in BUILTIN_MODULES:
        reward: Reward = import_function(settings.function)
        check_args(reward, settings.args, num_given=NUM_LISTS)
        return _loaded(settings, Built(reward=reward), settings.args)
    build = import_function(f"{BUILTIN_MODULES[settings.function]}:build")
    check_args(build, settings.args, num_given=1)
    if missing := wanted(build, settings.args, num_given=1):
        raise TypeError(f"needs the argument {' and '.join(missing)}")
    built: Built | BuiltScorer = build(context, **settings.args)
    if isinstance(built, BuiltScorer):
        return LoadedFunction(settings=settings, scorer=_named(settings.name, built.scorer))
    return _loaded(settings, built, {})


def check_args(
    function: Callable[..., object], args: Mapping[str, object], *, num_given: int
) -> None:
    """Raise TypeError unless a function accepts `args` by name, besides `num_given` by position."""
    parameters = list(inspect.signature(function).parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    named = [p.name for p in parameters[num_given:] if p.kind is not p.VAR_POSITIONAL]
    unknown = [name for name in args if name not in named]
    if unknown:
        raise TypeError(f"has no argument {unknown[0]!r}; it takes {', '.join(named) or 'none'}")


def wanted(
    function: Callable[..., object], args: Mapping[str, object], *, num_given: int = NUM_LISTS
) -> tuple[str, ...]:
    """Return the names of further arguments that a function takes besides `args` and `num_given`
    positional ones: every parameter without a default, and the reserved names.

    Raise TypeError when it does not take that many positional arguments (prompts, responses and
    answers).
    """
    parameters = list(inspect.signature(function).parameters.values())
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_all = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(by_place) < num_given and not takes_all:
        raise TypeError("does not take (prompts, responses, answers)")
    rest = [p for p in parameters if p not in by_place[:num_given]]
    named = [p for p in rest if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return tuple(
        p.name for p in named if p.name not in args and (p.default is p.empty or p.name in RESERVED)
    )


def judge(returned: object, num_expected: int) -> list[float | None] | str:
    """Return the rewards that a function gave, with None for no score, or a message if they are
    invalid.
    """
    expected = f"expected a list of {num_expected} numbers"
    if not isinstance(returned, Collection) or isinstance(returned, (str, bytes, dict, Set)):
        return f"returned {returned!r:.80}, {expected}"
    values = list(returned)
    if len(values) != num_expected:
        return f"returned {len(values)} rewards for {num_expected} responses, {expected}"
    for value in values:
        if value is not None and not (isinstance(value, Real) and math.isfinite(value)):
            return f"returned {value!r:.80} as a reward, {expected}, all of them finite, or None"
    return [None if value is None else float(value) for value in values]


def _loaded(settings: RewardFunction, built: Built, args: Mapping[str, object]) -> LoadedFunction:
    names = (*built.columns, *wanted(built.reward, args))

    def score(responses: Responses) -> list[Verdict]:
        num = len(responses.texts)
        values: list[float | None] | str = ""
        with Caught() as caught:
            values = judge(_answered(built.reward, responses, names, args), num)
        if caught.message:
            return [Verdict(outcome="crash", name=settings.name, message=caught.message)] * num
        if isinstance(values, str):
            return [Verdict(outcome="refused", name=settings.name, message=values)] * num
        return [_verdict(settings.name, value, built.last_failure()) for value in values]

    return LoadedFunction(
        settings=settings,
        scorer=score,
        columns=tuple(name for name in names if name not in RESERVED),
        note=built.note,
    )


def _named(name: str, scorer: Scorer) -> Scorer:
    return lambda responses: [replace(verdict, name=name) for verdict in scorer(responses)]


def _answered(
    reward: Reward, responses: Responses, names: tuple[str, ...], args: Mapping[str, object]
) -> object:
    """Call the function; run the result to its end if it is a coroutine."""
    num = len(responses.texts)
    returned = reward(
        [responses.prompt.text] * num,
        list(responses.texts),
        [responses.prompt.answer] * num,
        **{name: responses.argument(name) for name in names},
        **args,
    )
    return _runner().run(_awaited(returned)) if inspect.isawaitable(returned) else returned


def _verdict(name: str, value: float | None, last_failure: str) -> Verdict:
    if value is None:
        why = f": {last_failure}" if last_failure else ""
        message = f"has no score for this response{why}"
        return Verdict(outcome="no_score", name=name, message=message)
    return Verdict(outcome="scored", name=name, value=value)


@cache
def _runner() -> asyncio.Runner:
    """Return the event loop of this process: one for all calls, so that connections stay open."""
    return asyncio.Runner()


async def _awaited(awaitable: Awaitable[object]) -> object:
    return await awaitable
