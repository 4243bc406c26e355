"""Programs of agents: a coroutine function with a client of the package openai, or a command."""

from __future__ import annotations

import inspect
import json
import os
import shlex
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from april_rl.task.environments.agent.commands import output_of
from april_rl.task.environments.agent.endpoint import Access
from april_rl.task.environments.protocol import Context

# Runs an episode of a row with a seed and returns its reward.
Program = Callable[[Access, Mapping[str, Any], int], Awaitable[object]]


def check_function(function: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """Raise TypeError for a function that cannot be called as an agent."""
    try:
        inspect.signature(function).bind(None, {}, 0, **args, **_context(function, None))
    except TypeError as error:
        raise TypeError(
            f"an agent must accept (client, row, seed) and environment.args: {error}; name a tool "
            "that is a coroutine function in a list of tools"
        ) from None


def _context(function: Callable[..., Any], context: Context | None) -> dict[str, Context | None]:
    takes_it = "context" in inspect.signature(function).parameters
    return {"context": context} if takes_it else {}


def of_function(function: Callable[..., Any], args: Mapping[str, Any], context: Context) -> Program:
    """Return the program that calls a coroutine function with a client of the package openai."""
    keywords = {**args, **_context(function, context)}

    async def run(access: Access, row: Mapping[str, Any], seed: int) -> object:
        # Importing it takes a second, and environments without agents need not wait for it.
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        # Nothing is encrypted; loading certificates would take longer than an episode.
        http = DefaultAsyncHttpxClient(verify=False, timeout=None, trust_env=False)  # no proxy
        url, key = access
        async with AsyncOpenAI(base_url=url, api_key=key, timeout=None, http_client=http) as client:
            try:
                return await function(client, row, seed, **keywords)
            except (SystemExit, KeyboardInterrupt) as error:  # either would end the whole process
                raise RuntimeError(f"the agent raised {error!r}") from error

    return run


def of_command(command: str, context: Context) -> Program:
    """Return the program that runs a command and returns the number that it prints last, or None,
    and raises ValueError for other text.
    """
    words = shlex.split(command)
    prompt_id, index = context.sample_id

    async def run(access: Access, row: Mapping[str, Any], seed: int) -> float | None:
        variables = {"OPENAI_BASE_URL": access.base_url, "OPENAI_API_KEY": access.key}
        variables |= {"APRIL_RL_ROW": json.dumps(row, default=str), "APRIL_RL_SEED": str(seed)}
        variables["APRIL_RL_SAMPLE"] = f"{prompt_id}-{index}"
        host = urlsplit(access.base_url).hostname
        for name in ("NO_PROXY", "no_proxy"):
            variables[name] = ",".join(filter(None, (os.environ.get(name), host)))
        printed = await output_of(words, variables, mark="OPENAI_API_KEY")
        lines = [line for line in printed.split("\n") if line.strip()]
        try:
            return float(lines[-1]) if lines else None
        except ValueError:
            raise ValueError(f"the last line must be the reward, got {lines[-1]!r:.80}") from None

    return run
