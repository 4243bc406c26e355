"""Agents: programs that talk to the policy through a client of OpenAI's API, as environments.

An agent is an environment turned inside out: it calls, and what it asks next is the answer to the
turn before. Its reward is what it returns at its end.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shlex
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import psutil

from april_rl.environments.chat import (
    ChatRequest,
    RefusedError,
    answer_message,
    new_messages,
)
from april_rl.environments.endpoint import Access, Answered, Endpoint
from april_rl.environments.protocol import StepResult, Turn
from april_rl.types import Message

# Runs an episode of a row with a seed; returns what it gives as reward.
Program = Callable[[Access, Mapping[str, Any], int], Awaitable[object]]
_SHOWN_BYTES = 2000  # of what a failed command wrote last
_MAX_AGAIN = 20  # retries of a client that did not get its answer


class Agent:
    """One episode, as an `Environment`."""

    def __init__(self, program: Program, endpoint: Endpoint, *, name: str) -> None:
        """Start nothing yet. `name` is that of the sample."""
        self._program, self._endpoint, self._name = program, endpoint, name
        self._access: Access | None = None
        self._running: asyncio.Task[object] | None = None
        self._requests: asyncio.Queue[tuple[Message, ...]] = asyncio.Queue()
        self._history: list[Message] = []  # the conversation up to the last answer
        self._tools: tuple[Mapping[str, Any], ...] = ()
        self._asked: ChatRequest | None = None  # the last request
        self._answer: asyncio.Future[Answered] | None = None  # to it
        self._num_turns = 0
        self._is_over = False  # the budget is used up: nothing more is sampled
        self._was_told = False  # that it is, in answer to a request
        self._num_again = 0  # times that the last request came again after its answer
        self._has_ended = False

    async def reset(self, row: Mapping[str, Any], seed: int) -> StepResult:
        """Start the program; return its first request."""
        self._access = await self._endpoint.admit(self)
        running = self._program(self._access, row, seed)
        self._running = asyncio.ensure_future(running)
        messages = await self._next_request()
        if messages is None:
            self._running.result()  # raises what ended it
            raise RuntimeError("the agent ended before it asked the policy anything")
        return StepResult(messages, tools=self._tools)

    async def step(self, turn: Turn) -> StepResult:
        """Answer the request with a turn; return what the next one adds, or the reward."""
        assert self._answer is not None
        assert self._asked is not None
        if self._answer.done():
            raise RuntimeError(
                f"the agent ended after {self._num_turns} turns, when it was started again to go "
                "on: it is not repeatable"
            )
        self._num_turns += 1
        self._is_over = turn.is_last
        message = answer_message(turn, self._asked, number=self._num_turns)
        self._history = [*self._asked.messages, message]
        self._answer.set_result(Answered(turn, message, f"{self._name}-{self._num_turns}"))
        messages = await self._next_request()
        if messages is not None:
            return StepResult(messages)
        return StepResult(reward=self._reward(), is_final=True)

    def end(self) -> None:
        """Stop the program if it still runs."""
        self._has_ended = True
        if self._access is not None:
            self._endpoint.dismiss(self._access)
        if self._running is not None:
            self._running.add_done_callback(_forget_failure)
            self._running.cancel()
        if self._answer is not None and not self._answer.done():
            self._answer.cancel()

    def ask(self, request: ChatRequest) -> asyncio.Future[Answered]:
        """Take a request of the program. The last one again, from a client that lost patience or
        its connection, gets the same answer.
        """
        if self._has_ended:
            raise RefusedError("the episode has ended")
        if self._asked == request:
            assert self._answer is not None
            self._num_again += self._answer.done()
            if self._num_again <= _MAX_AGAIN:
                return self._answer
            raise RefusedError(
                "the same request gets the same answer: add a message to get another one"
            )
        if self._is_over:
            self._was_told = True
            raise RefusedError(
                "the episode is over: its budget of turns or tokens is used up; catch this, and "
                "return the reward"
            )
        if self._answer is not None and not self._answer.done():
            raise RefusedError("the last request is not answered yet: an episode has one at a time")
        if self._asked is not None and request.tools != self._tools:
            raise RefusedError("tools must stay as they were in the first request")
        messages = new_messages(self._history, request.messages)
        self._tools, self._asked, self._num_again = request.tools, request, 0
        self._answer = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(messages)
        return self._answer

    async def _next_request(self) -> tuple[Message, ...] | None:
        """Return what the next request adds; None when the program has ended."""
        assert self._running is not None
        request = asyncio.ensure_future(self._requests.get())
        try:
            await asyncio.wait({request, self._running}, return_when=asyncio.FIRST_COMPLETED)
            return request.result() if request.done() else None
        finally:
            request.cancel()

    def _reward(self) -> float:
        """Return the reward of a program that has ended; raise what it raised, unless it was told
        that the episode is over.
        """
        assert self._running is not None
        if self._running.exception() is not None and self._was_told:
            return 0.0
        reward = self._running.result()
        if reward is None:
            return 0.0
        if not isinstance(reward, (int, float)):
            raise TypeError(f"the agent returned {reward!r:.80}, expected a number or None")
        return float(reward)


def check_function(function: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """Raise TypeError for what cannot be called as an agent."""
    if not inspect.iscoroutinefunction(function):
        raise TypeError("is no coroutine function: async def run(client, row, seed)")
    try:
        inspect.signature(function).bind(None, {}, 0, **args)
    except TypeError as error:
        raise TypeError(
            f"is called with (client, row, seed) and environment.args: {error}"
        ) from None


def of_function(function: Callable[..., Any], args: Mapping[str, Any]) -> Program:
    """Return the program that calls a coroutine function with a client of the package openai."""

    async def run(access: Access, row: Mapping[str, Any], seed: int) -> object:
        # Importing it takes a second, which other environments need not wait.
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        # Nothing is encrypted; loading certificates would take longer than an episode.
        http = DefaultAsyncHttpxClient(verify=False, timeout=None, trust_env=False)  # no proxy
        url, key = access
        async with AsyncOpenAI(base_url=url, api_key=key, timeout=None, http_client=http) as client:
            try:
                return await function(client, row, seed, **args)
            except (SystemExit, KeyboardInterrupt) as error:  # they would end the whole process
                raise RuntimeError(f"the agent raised {error!r}") from error

    return run


def of_command(command: str) -> Program:
    """Return the program that runs a command."""
    return partial(_run_command, shlex.split(command))


async def _run_command(
    words: Sequence[str], access: Access, row: Mapping[str, Any], seed: int
) -> float | None:
    """Return the number in the last line that a command prints; None if it prints nothing. Raise
    RuntimeError when it fails, ValueError when that line is no number.
    """
    told = {"OPENAI_BASE_URL": access.base_url, "OPENAI_API_KEY": access.key}
    told |= {"APRIL_RL_ROW": json.dumps(row, default=str), "APRIL_RL_SEED": str(seed)}
    for name in ("NO_PROXY", "no_proxy"):
        told[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1")))
    process = await asyncio.create_subprocess_exec(
        *words, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env={**os.environ, **told}
    )
    try:
        printed, complained = await process.communicate()
    finally:
        with suppress(psutil.NoSuchProcess):  # and what it has started
            for each in psutil.Process(process.pid).children(recursive=True):
                each.kill()
        with suppress(ProcessLookupError):
            process.kill()
    if process.returncode:
        last = complained[-_SHOWN_BYTES:].decode(errors="replace").strip()
        raise RuntimeError(f"{shlex.join(words)} ended with exit code {process.returncode}: {last}")
    lines = printed.decode(errors="replace").split("\n")
    said = [line for line in lines if line.strip()]
    try:
        return float(said[-1]) if said else None
    except ValueError:
        raise ValueError(f"the last line must be the reward, got {said[-1]!r:.80}") from None


def _forget_failure(running: asyncio.Task[object]) -> None:
    """Look at the exception of a program that nobody waits for: asyncio reports others."""
    if not running.cancelled():
        running.exception()
