"""Turn a setting into environments and describe them, in their process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, cast

from april_rl.config.environment import EnvironmentConfig
from april_rl.config.runtime import UserCodeConfig
from april_rl.config.user_code import (
    Caught,
    check_args,
    further_names,
    import_object,
)
from april_rl.task.environments.adapters import (
    FunctionTools,
    ToolsEnvironment,
    class_of_functions,
    columns_of,
    is_of_tools,
    methods_of,
    names_of,
    tools_of,
)
from april_rl.task.environments.agent.agent import Agent
from april_rl.task.environments.agent.endpoint import Endpoint, check_address
from april_rl.task.environments.agent.programs import check_function, of_command, of_function
from april_rl.task.environments.child import kill, start
from april_rl.task.environments.protocol import Context, Environment, EnvironmentFailedError, Loads


class Description(NamedTuple):
    """Facts of a class that the controller needs before it reads the data."""

    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas of the tools, for the chat template
    columns: tuple[str, ...] = ()  # data columns that its `reset` names
    has_reward: bool = True  # False: the setting names a tool or a list of tools
    is_agent: bool = False  # it writes the prompts itself


def describe(config: EnvironmentConfig, limits: UserCodeConfig) -> Description:
    """Return the description of the environment, made in a process, empty if there is none; raise
    EnvironmentFailedError.
    """
    if not config.is_set:
        return Description()
    connection, process = start(partial(_describe, config), limits)
    found: Description | str = (
        "its process died or did not load it within "
        f"user_code.start_timeout_s={limits.start_timeout_s:g}"
    )
    with suppress(EOFError):
        if connection.poll(limits.start_timeout_s):
            found = connection.recv()
    kill(process)
    if isinstance(found, str):
        raise EnvironmentFailedError(f"{config.setting}: {found}")
    return found


def _describe(config: EnvironmentConfig, connection: Connection) -> None:
    found = Description(is_agent=True)
    with Caught() as caught:
        loaded = load(config)
        if inspect.isclass(loaded):
            has_tools = is_of_tools(loaded)
            found = _describe_class(loaded, config.args) if has_tools else Description()
    connection.send(caught.message or found)


def _describe_class(found: type[Any], args: Mapping[str, Any]) -> Description:
    methods = methods_of(found(**args))
    tools = tuple(_schema(methods[name]) for name in tools_of(found))
    return Description(tools, columns_of(found), has_reward=not issubclass(found, FunctionTools))


def _schema(tool: Callable[..., Any]) -> Mapping[str, Any]:
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        return cast("Mapping[str, Any]", get_json_schema(tool))
    except (DocstringParsingException, TypeHintParsingException) as error:
        name = tool.__name__
        raise TypeError(
            f"the tool {name} needs a type hint for each argument and a docstring with an Args: "
            f"section on each, because the policy reads them ({str(error).rstrip('!.')})"
        ) from None


def load(config: EnvironmentConfig) -> Any:  # noqa: ANN401 (the user's class or function)
    """Return the class of the settings, or the coroutine function that is an agent; None for a
    command. A function or a list of functions becomes a class with these as its tools. Raise
    TypeError or ValueError if it cannot be used; errors of its module pass through.
    """
    function, args = config.function, config.args
    found = import_object(function) if function else None
    if not function or inspect.iscoroutinefunction(found):
        check_address(config.address)
        if inspect.iscoroutinefunction(found):
            check_function(found, args)
        return found
    if not inspect.isclass(found):
        found = class_of_functions(found if isinstance(found, list | tuple) else [found])
    if not (is_of_tools(found) or {"reset", "step"} <= names_of(found)):
        raise TypeError(
            f"{function} lacks the methods of an environment: `reset` and `step`, or `reset` and "
            "tools (TRL's form)"
        )
    check_args(found, args)
    if absent := further_names(found, args):
        raise TypeError(f"needs the argument {' and '.join(absent)}")
    return found


def environments_of(
    config: EnvironmentConfig, endpoint: Endpoint
) -> Callable[[Context], Environment]:
    """Return a function that makes an instance, ready for `reset`; raise as `load` does."""
    found = load(config)

    def new_agent(context: Context) -> Environment:
        program = (
            of_command(config.command, context)
            if config.command is not None
            else of_function(found, config.args, context)
        )
        prompt_id, index = context.sample_id
        name, patience_s = f"{prompt_id}-{index}", config.step_timeout_s / 2
        return Agent(program, endpoint, name=name, patience_s=patience_s)

    if not inspect.isclass(found):
        return new_agent
    has_tools = is_of_tools(found)

    def new(context: Context) -> Environment:
        made = found(**config.args)
        if isinstance(made, Loads):
            made.load(context)
        if has_tools:
            return ToolsEnvironment(made)
        assert isinstance(made, Environment)
        return made

    return new
