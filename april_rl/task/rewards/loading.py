"""Turns a setting into a reward that can be called, in a reward process."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from april_rl.answers.extraction import with_thinking
from april_rl.config.task import BUILTIN_REWARDS
from april_rl.config.user_code import (
    Caught,
    check_args,
    further_names,
    import_function,
    name_of,
)
from april_rl.task.rewards.functions import RewardFunction, builder_of
from april_rl.task.rewards.jobs import DecodedJob, RewardError
from april_rl.types import SampleId, Score

if TYPE_CHECKING:
    import asyncio

LISTS = ("prompts", "responses", "answers")  # what every function receives
# What a function receives if its signature names it, with a default or not.
RESERVED = ("num_tokens", "truncated", "datasets", "environment_rewards")

LARGEST = 1e30  # largest size of a reward: advantages of such rewards are finite in float32
_LONG_BITS = 1024  # integers of more bits are not written out in messages


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardContext:
    """Facts of the run that a reward may need in addition to its own arguments."""

    extract: str  # reward.extract
    soft_timeout_s: float
    hard_timeout_s: float
    num_processes: int  # reward processes; each loads the reward for itself
    folder: Path | None  # the run directory; None outside a run


@runtime_checkable
class LoadingReward(Protocol):
    """A reward that prepares itself, once in each process."""

    def load(self, context: RewardContext) -> None:
        """Prepare for the first call."""


@runtime_checkable
class SavingReward(Protocol):
    """A reward with a state."""

    def save(self) -> object:
        """Return the state as plain data, for JSON."""


@runtime_checkable
class RestoringReward(Protocol):
    """A reward that continues from a state."""

    def restore(self, state: Any) -> None:  # noqa: ANN401
        """Continue where `save` returned `state`."""


@runtime_checkable
class Array(Protocol):
    """An array or tensor, or a scalar of such a library."""

    def tolist(self) -> object:
        """Return the numbers as Python's own, in lists unless it has no dimension."""


class SoftTimeout(float):
    """The value of a response on which a built-in stopped at its own time limit."""


@dataclass(slots=True, kw_only=True)
class Reward:
    """A reward function or object that is ready to be called."""

    call: Callable[..., object]  # function of prompts, responses, answers and named arguments
    # Named arguments that are the same in every call.
    args: Mapping[str, object] = field(default_factory=dict)
    columns: tuple[str, ...] = ()  # data columns; those in the signature of `call` are added
    note: str = ""  # shown to the user before training starts
    last_failure: Callable[[], str] = str  # why the last call gave no score
    # Whether responses get the `<think>` that a chat template has written, if it is not closed.
    is_builtin: bool = field(default=False, init=False)
    # JSON after the last call; None: it has no state.
    state: str | None = field(default=None, init=False)
    _names: tuple[str, ...] = field(init=False)  # columns and reserved names of a call
    _lists: tuple[str, ...] = field(init=False)  # see names_of_lists

    def __post_init__(self) -> None:
        self._lists = names_of_lists(self.call)
        further = further_names(self.call, self.args, given=LISTS, also=RESERVED)
        self._names = (*self.columns, *further)
        self.columns = tuple(name for name in self._names if name not in RESERVED)

    def load(self, context: RewardContext, state: str | None) -> None:
        """Prepare the reward, from `state` if given. Raise TypeError if it cannot be kept."""
        if isinstance(self.call, LoadingReward):
            self.call.load(context)
        if isinstance(self.call, SavingReward) != isinstance(self.call, RestoringReward):
            raise TypeError("has one of save and restore; it needs both, or neither")
        if isinstance(self.call, SavingReward) and context.num_processes > 1:
            raise TypeError(
                "has a state to save, which one process must keep: set reward.num_processes=1, "
                f"it is {context.num_processes}"
            )
        if state is not None:
            self.restore(state)
        self._save()

    def restore(self, state: str) -> None:
        """Continue from a state."""
        if isinstance(self.call, RestoringReward):
            self.call.restore(json.loads(state))
            self.state = state

    def scores(self, function: RewardFunction, job: DecodedJob) -> list[Score]:
        """Return the score of each response [n] by this function; raise RewardError if it does not
        return a list of them. A response may cause an error or a value such as NaN: then none of
        the responses has a score.
        """
        values: list[float | None] | str = ""
        with Caught() as caught:
            values = read_values(self._call(job), len(job.texts))
        failure = f"raised {caught.message}" if caught.message else ""
        if isinstance(values, list):
            failure = describe_wrong(values, weight=function.weight)
        if failure:
            message = f"{function} {failure}"
            return [Score(sample_id, None, "crash", message) for sample_id in job.sample_ids]
        with Caught() as caught:
            self._save()
        if caught.message:
            values = f"has no state that can be saved: {caught.message}"
        if isinstance(values, str):
            raise RewardError(f"{function} {values}")
        pairs = zip(job.sample_ids, values, strict=True)
        return [self._score(function, sample_id, value) for sample_id, value in pairs]

    def _save(self) -> None:
        if isinstance(self.call, SavingReward):
            self.state = json.dumps(self.call.save())

    def _call(self, job: DecodedJob) -> object:
        num = len(job.texts)
        texts = list(job.texts)
        if self.is_builtin:
            texts = [with_thinking(job.prompt.text, text) for text in texts]
        lists = ([job.prompt.text] * num, texts, [job.prompt.answer] * num)
        by_name = dict(zip(self._lists, lists, strict=True)) if self._lists else {}
        returned = self.call(
            *(() if by_name else lists),
            **by_name,
            **{name: job.argument(name) for name in self._names},
            **self.args,
        )
        return _runner().run(_finish(returned)) if inspect.isawaitable(returned) else returned

    def _score(self, function: RewardFunction, sample_id: SampleId, value: float | None) -> Score:
        if value is None:
            why = f": {failure}" if (failure := self.last_failure()) else ""
            message = f"{function} gave no score for this response{why}"
            return Score(sample_id, None, "no_score", message)
        return Score(
            sample_id=sample_id,
            value=function.weight * float(value),
            outcome="soft_timeout" if isinstance(value, SoftTimeout) else "scored",
            parts=((function.name, float(value)),),
        )


def each_response(score: Callable[[str, str], float]) -> Reward:
    """Return a reward that scores each response by itself, given the right answer."""

    def scores(prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:  # noqa: ARG001
        return list(map(score, responses, answers))

    return Reward(call=scores)


def load_reward(
    settings: RewardFunction, context: RewardContext, *, state: str | None = None
) -> Reward:
    """Import a reward function, construct a reward object, or build a built-in.

    `state` is the one to continue from. Raise TypeError when it does not accept the arguments in
    the settings; errors of the user's code pass through.
    """
    if settings.function in BUILTIN_REWARDS:
        build = import_function(builder_of(settings.function))
        check_args(build, settings.args, given=("context",))
        if missing := further_names(build, settings.args, given=("context",)):
            raise TypeError(f"needs the argument {' and '.join(missing)}")
        built: Reward = build(context, **settings.args)
        built.is_builtin = True
        return built
    found = import_function(settings.function)
    is_class = inspect.isclass(found)
    check_args(found, settings.args, given=() if is_class else LISTS)
    if is_class:
        if "__call__" not in dir(found):
            raise TypeError(f"has no method __call__(self, {', '.join(LISTS)})")
        reward = Reward(call=found(**settings.args))
    else:
        reward = Reward(call=found, args=settings.args)
    reward.load(context, state)
    return reward


def names_of_lists(function: Callable[..., object]) -> tuple[str, ...]:
    """Return what a function calls each of LISTS, or nothing when it takes them by position.

    A leading underscore, as for an argument that is not used, makes no difference. Raise TypeError
    when one is missing, as in a function for another trainer: it would get our lists in its order.
    """
    parameters = list(inspect.signature(function).parameters.values())
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_more = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    first = tuple(name_of(p) for p in by_place[: len(LISTS)])
    if first == LISTS or (takes_more and first == LISTS[: len(first)]):
        return ()
    named = {
        name_of(p): p.name
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    if not named.keys() >= set(LISTS):
        raise TypeError(
            f"takes ({', '.join(p.name for p in parameters)}), expected ({', '.join(LISTS)}) by "
            f"these names, and data columns by theirs{_hint_at_trainer(named)}"
        )
    return tuple(named[name] for name in LISTS)


def _hint_at_trainer(named: Collection[str]) -> str:
    """Return how to call a reward that was written for TRL or verl; empty for other functions."""
    if "completions" in named:
        return "; this is one of TRL's: its completions are responses here, a list of texts"
    if "solution_str" in named:
        return (
            "; this is one of verl's, for one response: here lists come in and a list of numbers "
            "goes out, return [compute_score(None, text, answer) for text, answer in "
            "zip(responses, answers)]"
        )
    return ""


def read_values(returned: object, num_expected: int) -> list[float | None] | str:
    """Return the values that a function gave (None: no score), or a message if they are not a list
    of this length.
    """
    expected = f"expected a list of {num_expected} numbers"
    plain = returned.tolist() if isinstance(returned, Array) else returned
    if not isinstance(returned, Collection) or isinstance(plain, (str, bytes, dict, Set, Real)):
        return f"returned {returned!r:.80}, {expected}"
    values = [_number(value) for value in returned]
    if len(values) != num_expected:
        return f"returned {len(values)} rewards for {num_expected} responses, {expected}"
    return values


def describe_wrong(values: Sequence[Any], *, weight: float = 1.0) -> str:
    """Return a message about the first value that is neither a finite number of a size that can be
    trained on nor None; empty if there is none.
    """
    for value in values:
        if value is None or _is_reward(value, weight):
            continue
        is_long = isinstance(value, int) and value.bit_length() > _LONG_BITS
        shown = f"an integer of {value.bit_length():,} bits" if is_long else f"{value!r:.80}"
        return (
            f"returned {shown} as a reward, expected a list of {len(values)} numbers, all of them "
            f"finite, or None; neither the value nor weight={weight:g} times the value may be "
            f"beyond ±{LARGEST:g}: scale or clip it in the function"
        )
    return ""


def _is_reward(value: object, weight: float) -> bool:
    if not isinstance(value, (Real, Decimal)):
        return False
    try:
        size = abs(float(value))
    except (OverflowError, ValueError):  # a whole number beyond all floats, a signalling NaN
        return False
    return size <= LARGEST and size * abs(weight) <= LARGEST


def _number(value: object) -> Any:  # noqa: ANN401
    if not isinstance(value, Array):
        return value
    plain = value.tolist()
    while isinstance(plain, list) and len(plain) == 1:
        (plain,) = plain
    return plain


@cache
def _runner() -> asyncio.Runner:
    """Return the event loop of this process: one for all calls, so that connections stay open."""
    import asyncio  # a start that is refused does without it

    return asyncio.Runner()


async def _finish(awaitable: Awaitable[object]) -> object:
    return await awaitable
