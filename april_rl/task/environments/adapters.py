"""Adapter for environments in the form of TRL's classes.

TRL's `environment_factory` (1.16): a class with `reset(**row) -> str | None` whose other public
methods are tools, described by type hints and docstrings, and optionally `get_reward() -> float`. A
turn without a call ends the episode. Source: docstring of trl.GRPOTrainer.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from april_rl.task.environments.protocol import StepResult, ToolCall, Turn
from april_rl.task.environments.threads import call
from april_rl.types import Message

_RESERVED = ("reset", "get_reward", "load")
OWN_COLUMNS = ("prompt", "answer", "dataset")


def methods_of(made: object) -> dict[str, Callable[..., Any]]:
    return dict(inspect.getmembers(made, predicate=inspect.ismethod))


def names_of(found: type[Any]) -> set[str]:
    """Return the names of the methods of a class, without static ones."""
    return {name for name, _ in inspect.getmembers_static(found, inspect.isfunction)}


def is_of_tools(found: type[Any]) -> bool:
    return "reset" in (names := names_of(found)) and "step" not in names and bool(tools_of(found))


def tools_of(found: type[Any]) -> list[str]:
    """Return the names of the methods of a class in TRL's form that are tools."""
    public = (name for name in names_of(found) if not name.startswith("_"))
    return sorted(name for name in public if name not in _RESERVED)


def columns_of(found: type[Any]) -> tuple[str, ...]:
    """Return the data columns that `reset` of a class in TRL's form needs."""
    parameters = list(inspect.signature(found.reset).parameters.values())[1:]
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [p for p in parameters if p.kind in kinds and p.default is p.empty]
    return tuple(p.name for p in named if p.name not in OWN_COLUMNS)


class FunctionTools:
    """A class in TRL's form without tools and rewards, to which `class_of_functions` adds tools."""

    def reset(self, **row: object) -> None:
        """Begin without a message; functions get nothing from the row."""


def class_of_functions(functions: Sequence[object]) -> type[FunctionTools]:
    """Return a class in TRL's form whose tools are functions. Raise TypeError for anything else."""
    tools: dict[str, Callable[..., Any]] = {}
    for function in functions:
        if not inspect.isroutine(function):
            raise TypeError(f"{function!r:.60} is neither a class, a function nor a list of them")
        name = function.__name__
        if name in tools or name in (*_RESERVED, "step") or not name.isidentifier():
            raise TypeError(f"a tool cannot be called {name}; give it another name")
        tools[name] = _as_method(function)
    return type("FunctionTools", (FunctionTools,), tools)


def _as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls a function and copies its type hints and docstring."""

    @functools.wraps(function)
    def method(_self: object, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return function(*args, **kwargs)

    signature = inspect.signature(function)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [itself, *signature.parameters.values()]
    vars(method)["__signature__"] = signature.replace(parameters=parameters)
    return method


class ToolsEnvironment:
    """An instance of a class in TRL's form."""

    def __init__(self, tools: Any) -> None:  # noqa: ANN401
        self._instance, methods = tools, methods_of(tools)
        self._reset, self._get_reward = methods["reset"], methods.get("get_reward")
        self._tools = {name: methods[name] for name in tools_of(type(tools))}

    async def reset(self, row: Mapping[str, Any], seed: int) -> Any:  # noqa: ANN401, ARG002
        """Begin with the columns that `reset` takes."""
        parameters = inspect.signature(self._reset).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        given = {name: value for name, value in row.items() if takes_all or name in parameters}
        return await call(self._reset, **given)

    async def step(self, turn: Turn) -> StepResult:
        """Make the calls of a turn, one after another; a turn without a call ends the episode."""
        messages: list[Message] = []
        if turn.fault:
            messages.append({"role": "tool", "name": "unknown", "content": turn.fault})
        for each in turn.calls:
            result = await self._result(each)
            messages.append({"role": "tool", "name": each.name, "content": result})
        if messages and not turn.is_last:
            return StepResult(messages)
        return StepResult(reward=await self._reward(), is_final=True)

    async def _reward(self) -> float:
        """Return the result of `get_reward`, or the attribute `reward`, as in TRL's examples."""
        if self._get_reward is None:
            try:
                return float(self._instance.reward)
            except AttributeError:
                return 0.0
        return float(await call(self._get_reward))

    async def _result(self, asked: ToolCall) -> str:
        """Return the result of a tool as text; the policy reads errors and exits, too."""
        if asked.name not in self._tools:
            return str({"error": f"there is no tool {asked.name}; use {', '.join(self._tools)}"})
        try:
            return str(await call(self._tools[asked.name], **asked.arguments))
        except (Exception, SystemExit) as error:  # a tool may raise anything
            return str({"error": str(error) or type(error).__name__})
