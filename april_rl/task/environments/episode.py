"""One episode in its process: call an environment with a time limit, and check what it returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from april_rl.config.environment import EnvironmentConfig
from april_rl.config.user_code import Caught
from april_rl.task.environments import door
from april_rl.task.environments.agent.agent import Agent
from april_rl.task.environments.calls import Calls
from april_rl.task.environments.protocol import Environment, StepResult, Turn
from april_rl.task.environments.threads import call, threads, time_limit
from april_rl.types import SampleId

Outcome = Literal["returned", "error", "timeout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRequest:
    """A request to an episode, to begin or to take a turn, as plain data."""

    number: int  # number of the question, which the reply repeats
    sample_id: SampleId
    # Row for beginning the episode, or for building it again from all of `turns`; None: the episode
    # is alive in the process.
    row: Mapping[str, Any] | None
    seed: int
    turns: tuple[Turn, ...]  # the turns that have no observation yet
    calls_again: bool = False  # the episode was lost: begin it again, with all its calls


class Forget(NamedTuple):
    """A request to forget an episode."""

    sample_id: SampleId


@dataclass(slots=True, kw_only=True)
class EpisodeReply:
    """The results of the methods that a request called, in order: `reset`, and `step` by turn."""

    number: int  # number of the question
    results: tuple[StepResult, ...] = ()  # each has a list of messages
    outcome: Outcome
    message: str = ""  # the reason why there is no observation
    elapsed_s: float = 0.0  # duration of the last call of a method
    num_calls: int = 0  # calls that `Context.once` made
    num_repeated: int = 0  # how many of them were further attempts
    num_hung: int = 0  # calls in the process that took too long and have not returned yet


class _TooSlowError(Exception):
    """A method did not return in time."""


class Episode:
    """An environment, once it is built, and its record of calls."""

    def __init__(
        self, build: Callable[[], Environment], calls: Calls, config: EnvironmentConfig
    ) -> None:
        """Build nothing yet: the first request does, within the time limit of a call."""
        self._build, self._calls, self._config = build, calls, config
        self._environment: Environment | None = None

    def close(self) -> None:
        """End the episode; parts of it that are still running cannot make calls any more."""
        self._calls.close()
        if isinstance(self._environment, Agent):
            self._environment.end()

    async def reply_to(self, request: EpisodeRequest) -> EpisodeReply:
        """Begin if asked to, take the turns, and return all results, even after a failure."""
        results: list[StepResult] = []
        max_tokens = self._config.max_observation_tokens
        outcome: Outcome = "error"
        began_s = time.monotonic()
        with Caught() as caught:
            try:
                if self._environment is None:
                    self._environment = await self._call_in_time(self._build)
                if isinstance(self._environment, Agent) and request.row is not None:
                    self._environment.expect([turn.request_key for turn in request.turns])
                if request.row is not None:
                    returned = await self._call_in_time(
                        self._environment.reset, request.row, request.seed
                    )
                    results.append(door.opening(returned, max_tokens=max_tokens))
                for turn in request.turns:
                    began_s = time.monotonic()
                    returned = await self._call_in_time(self._environment.step, turn)
                    results.append(door.result(returned, max_tokens=max_tokens))
                outcome = "returned"
            except _TooSlowError:
                outcome = "timeout"
                raise
        elapsed_s = time.monotonic() - began_s
        if outcome != "returned":
            self.close()
        num_calls, num_repeated = self._calls.take_counts()
        return EpisodeReply(
            number=request.number,
            results=tuple(results),
            outcome=outcome,
            message=door.repair(caught.message),
            elapsed_s=elapsed_s,
            num_calls=num_calls,
            num_repeated=num_repeated,
            num_hung=threads.num_hung,
        )

    async def _call_in_time(self, method: Callable[..., Any], *args: object) -> Any:  # noqa: ANN401
        """Call a method, in a thread unless it is a coroutine; raise _TooSlowError if it hangs."""
        limit_s = self._config.step_timeout_s
        try:
            async with time_limit(limit_s) as limit:
                return await call(method, *args)
        except TimeoutError:
            # The time limit has not passed: the user's code raised the error.
            if not limit.expired():
                raise
        raise _TooSlowError(f"no answer within environment.step_timeout_s = {limit_s:g}")
