"""Agents: programs that talk to the policy through a client of OpenAI's API, as environments.

An agent is an environment turned inside out: it makes the calls, and its next request is the
observation after the previous turn. The value that it returns at its end is the reward.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from april_rl.task.environments.agent.chat import CompletionRequest, RefusedError
from april_rl.task.environments.agent.endpoint import Access, Client, Endpoint
from april_rl.task.environments.agent.programs import Program
from april_rl.task.environments.agent.responses import ApiResponse, added_messages, response_of
from april_rl.task.environments.protocol import StepResult, Turn

_MAX_WAITING = 64  # requests of an episode at a time
_OVER = (
    "the episode is over: its budget of turns or tokens is used up; catch this exception and "
    "return the reward"
)


@dataclass(slots=True, eq=False)
class _Request:
    """A request of the program, and the future that will have its response."""

    asked: CompletionRequest
    response: asyncio.Future[ApiResponse]
    clients: list[Client]  # the clients that wait for the response
    is_read: bool = False  # one of the clients has read the response

    @property
    def has_client(self) -> bool:
        """Return whether a client waits for the response, or has read it."""
        return self.is_read or not (self.response.done() or all(c.is_gone() for c in self.clients))


class Agent:
    """One episode, as an `Environment`."""

    def __init__(
        self, program: Program, endpoint: Endpoint, *, name: str, patience_s: float
    ) -> None:
        """Start nothing yet. A replay waits `patience_s` for each request that it repeats."""
        self._program, self._endpoint, self._name = program, endpoint, name
        self._patience_s = patience_s
        self._access: Access | None = None
        self._running: asyncio.Task[object] | None = None
        self._waiting: list[_Request] = []  # requests without a response, in the order of arrival
        self._arrival = asyncio.Event()  # set when another request arrives
        self._expected: deque[str] = deque()  # keys of requests that had responses before
        self._current: _Request | None = None  # the request that the next turn answers
        self._last: _Request | None = None  # the request that had the last response
        self._num_turns = 0
        self._is_over = False  # the budget is used up, and nothing more is sampled
        self._was_refused = False  # a request was refused because the budget is used up
        self._has_ended = False

    def expect(self, keys: Sequence[str]) -> None:
        """Expect requests with these keys first: simultaneous ones may come in another order."""
        self._expected = deque(keys)

    async def reset(self, row: Mapping[str, Any], seed: int) -> StepResult:
        """Start the program; return its first request."""
        self._access = await self._endpoint.admit(self.ask)
        running = self._program(self._access, row, seed)
        self._running = asyncio.ensure_future(running)
        self._current = await self._next_request()
        if self._current is None:
            self._running.result()  # raises the error that ended it
            raise RuntimeError("the agent ended before its first request to the policy")
        return _observe(self._current.asked)

    async def step(self, turn: Turn) -> StepResult:
        """Send the turn as a response; return the messages of the next request, or the reward."""
        current = self._current
        if current is None:
            raise RuntimeError(
                "the agent (of environment.function or command) is not repeatable: started "
                f"again to continue an episode, it ended after {self._num_turns} turns. Make it "
                "answer equal responses with equal requests, or set environment.on_restart=again: "
                "a resumed run then begins such groups again"
            )
        self._num_turns += 1
        response = response_of(turn, current.asked, name=self._name, number=self._num_turns)
        self._last = current
        self._waiting.remove(current)
        current.is_read = current.has_client
        current.response.set_result(response)
        if turn.is_last:
            self._close()
        self._current = await self._next_request()
        if self._current is None:
            return StepResult(reward=self._reward(), is_final=True)
        asked = self._current.asked
        added = added_messages(current.asked, response, asked)
        if added is None:
            return _observe(asked)._replace(begins_context=True)
        return _observe(asked)._replace(messages=added, tools=())

    def end(self) -> None:
        """Stop the program if it still runs."""
        self._has_ended = True
        if self._access is not None:
            self._endpoint.dismiss(self._access)
        if self._running is not None:
            self._running.add_done_callback(_forget_failure)
            self._running.cancel()
        for request in self._waiting:
            request.response.cancel()

    def ask(self, request: CompletionRequest, client: Client) -> asyncio.Future[ApiResponse]:
        """Accept a request of the program. If an earlier client gave up or lost its connection,
        the same request gets the response that no client has read.
        """
        if self._has_ended:
            raise RefusedError("the episode has ended")
        last = [self._last] if self._last is not None else []
        for known in [*self._waiting, *last]:
            if known.asked == request and (client.is_retry or not known.has_client):
                known.clients.append(client)
                known.is_read |= known.response.done()
                self._arrival.set()
                return known.response
        if self._is_over:
            self._was_refused = True
            raise RefusedError(_OVER)
        if len(self._waiting) >= _MAX_WAITING:
            raise RefusedError(f"{_MAX_WAITING} requests of the episode already wait; send fewer")
        made = _Request(request, asyncio.get_running_loop().create_future(), [client])
        self._waiting.append(made)
        self._arrival.set()
        return made.response

    def _close(self) -> None:
        self._is_over = True
        self._was_refused |= bool(self._waiting)
        for request in self._waiting:
            request.response.set_exception(RefusedError(_OVER))
            request.response.exception()  # read the exception, because the client may be gone
        self._waiting.clear()

    async def _next_request(self) -> _Request | None:
        if self._expected:
            # The program may ask something else now, which its tokens will show.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._patience_s):
                    return await self._request(self._expected.popleft())
        return await self._request("")

    async def _request(self, key: str) -> _Request | None:
        """Return the request with a key, or the first with a client; None at the program's end."""
        assert self._running is not None
        while not self._running.done():
            if not key:
                self._forget_abandoned()
            for request in self._waiting:
                if key in ("", request.asked.key):
                    return request
            self._arrival.clear()
            arrival = asyncio.ensure_future(self._arrival.wait())
            try:
                await asyncio.wait({arrival, self._running}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                arrival.cancel()
        return None

    def _forget_abandoned(self) -> None:
        """Forget requests whose clients have gone, so that nothing is sampled for them."""
        for request in self._waiting:
            if not request.has_client:
                request.response.cancel()
        self._waiting = [each for each in self._waiting if each.has_client]

    def _reward(self) -> float:
        """Return the reward of a program that has ended; raise what it raised, unless it was
        refused a request because the episode is over.
        """
        assert self._running is not None
        if self._running.exception() is not None and self._was_refused:
            return 0.0
        reward = self._running.result()
        if reward is None:
            return 0.0
        if not isinstance(reward, (int, float)):
            raise TypeError(f"the agent returned {reward!r:.80}, expected a number or None")
        return float(reward)


def _observe(asked: CompletionRequest) -> StepResult:
    return StepResult(
        asked.messages,
        tools=asked.tools,
        max_turn_tokens=asked.max_tokens,
        stop=asked.stop,
        request_key=asked.key,
    )


def _forget_failure(running: asyncio.Task[object]) -> None:
    """Read the exception of a program that no one awaits, because asyncio reports unread ones."""
    if not running.cancelled():
        running.exception()
