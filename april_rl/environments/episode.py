"""One episode in its process: calls the methods of an environment, with a time limit, and lets what
they return through the door.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from april_rl.environments import door
from april_rl.environments.agents import Agent
from april_rl.environments.calls import Calls
from april_rl.environments.jobs import Answer, Ask, Outcome
from april_rl.environments.protocol import Environment, Saves, StepResult
from april_rl.environments.threads import limited, threads
from april_rl.rewards.plugins import Caught


class _TooSlowError(Exception):
    """A method has not returned in time."""


class Episode:
    """An environment, once it is built, and the calls that it makes once."""

    def __init__(
        self, build: Callable[[], Environment], calls: Calls, *, limit_s: float, max_tokens: int
    ) -> None:
        """`limit_s` is the time that one call of a method, and `build`, may take; `max_tokens` is
        environment.max_observation_tokens.
        """
        self._build, self._calls = build, calls
        self._environment: Environment | None = None
        self._limit_s, self._max_tokens = limit_s, max_tokens
        self._said: list[str] = []  # by the policy, in every turn so far

    def close(self) -> None:
        """End the episode: what still runs of it makes no calls."""
        self._calls.close()
        if isinstance(self._environment, Agent):
            self._environment.end()

    async def answered(self, ask: Ask) -> Answer:
        """Begin if the question says so, take its turns, and return every result; those before a
        failure too.
        """
        results: list[StepResult] = []
        outcome: Outcome = "answered"
        began_s = time.monotonic()
        with Caught() as caught:
            try:
                if self._environment is None:
                    self._environment = await self._timed(self._build)
                if isinstance(self._environment, Agent) and ask.row is not None:
                    self._environment.expect([turn.request_key for turn in ask.turns])
                if ask.row is not None and not await self._restored(self._environment, ask):
                    returned = await self._timed(self._environment.reset, ask.row, ask.seed)
                    results.append(door.opening(returned, max_tokens=self._max_tokens))
                    await self._save(self._environment)
                for turn in ask.turns[len(self._said) if ask.row is not None else 0 :]:
                    began_s = time.monotonic()
                    returned = await self._timed(self._environment.step, turn)
                    results.append(door.result(returned, max_tokens=self._max_tokens))
                    self._said.append(turn.raw_text)
                    await self._save(self._environment)
            except _TooSlowError:
                outcome = "timeout"
                raise
        elapsed_s = time.monotonic() - began_s
        if caught.message:
            self.close()
            outcome = "timeout" if outcome == "timeout" else "error"
        num_calls, num_repeated = self._calls.take_counts()
        return Answer(
            number=ask.number,
            results=tuple(results),
            outcome=outcome,
            message=door.repaired(caught.message),
            elapsed_s=elapsed_s,
            num_calls=num_calls,
            num_repeated=num_repeated,
            num_hung=threads.num_hung,
        )

    async def _save(self, environment: Environment) -> None:
        """Write a snapshot of an environment that has them."""
        if isinstance(environment, Saves):
            state = await self._timed(environment.snapshot)
            try:
                self._calls.save(_key(self._said), state)
            except TypeError as error:
                raise door.GarbageError(
                    f"snapshot returned what is no data for JSON: {error}"
                ) from error

    async def _restored(self, environment: Environment, ask: Ask) -> bool:
        """Go on from the latest snapshot before the turn that is to be answered, if there is one;
        those after other turns belong to an episode that was given up.
        """
        if not isinstance(environment, Saves):
            return False
        said = [turn.raw_text for turn in ask.turns]
        for num_turns in reversed(range(len(said))):
            if self._calls.has_snapshot(_key(said[:num_turns])):
                state = self._calls.restored(_key(said[:num_turns]))
                await self._timed(environment.restore, ask.row, ask.seed, state)
                self._said = said[:num_turns]
                return True
        return False

    async def _timed(self, method: Callable[..., Any], *args: object) -> Any:  # noqa: ANN401
        """Call a method, in a thread unless it is a coroutine; raise _TooSlowError if it takes too
        long. A thread goes on then, and its result is lost.
        """
        try:
            async with limited(self._limit_s) as limit:
                if inspect.iscoroutinefunction(method):
                    return await method(*args)
                returned = await threads.called(method, *args)
                return await returned if inspect.isawaitable(returned) else returned
        except TimeoutError:
            if not limit.expired():  # it is of the user's code
                raise
        raise _TooSlowError(f"no answer within environment.step_timeout_s = {self._limit_s:g}")


def _key(said: Sequence[str]) -> str:
    return hashlib.blake2b(json.dumps(said).encode(), digest_size=16).hexdigest()
