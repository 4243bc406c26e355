"""The form of an environment: the class that a user writes, and what its methods get and return.

A minimal one:

    class Guess:
        def reset(self, row, seed):
            self.number = int(row["answer"])

        async def step(self, turn):
            if turn.text.strip() == str(self.number):
                return StepResult(reward=1.0, is_final=True)
            return StepResult("no, try again")

There is one instance for each sample. It sees text and never tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from april_rl.errors import RunError
from april_rl.types import Message, SampleId

Messages = str | Sequence[Message]  # a text stands for one message of the user
TEXT = "text"  # role of a text that is read unchanged, outside of the chat template


class EnvironmentFailedError(RunError, RuntimeError):
    """No episode can be run, so the run cannot continue."""


class ToolCall(NamedTuple):
    """A call of a tool that the policy asks for."""

    name: str
    arguments: Mapping[str, Any]


class Turn(NamedTuple):
    """One turn of the policy, as an environment reads it."""

    text: str  # without special tokens
    raw_text: str  # with special tokens, except the one that ended the turn
    is_truncated: bool = False  # cut off because its tokens or the budget were used up
    is_stopped: bool = False  # it ended at a text that an agent gave as `stop`
    is_last: bool = False  # no turn follows
    calls: tuple[ToolCall, ...] = ()  # calls of tools, for classes in TRL's form
    fault: str = ""  # why the calls could not be read
    num_tokens: int = 0  # the tokens that the policy sampled in it
    num_context: int = 0  # the tokens that it read before
    tokens: tuple[str, ...] = ()  # each of the `num_tokens` as text; for agents only
    logprobs: tuple[float, ...] = ()  # their log-probabilities at the run's temperature, in nats
    request_key: str = ""  # key of the request that the turn is the response to; for agents only


class StepResult(NamedTuple):
    """The reply of an environment to a turn."""

    messages: Messages = ()  # the policy reads them next; not used when the episode is over
    # The reward of this turn; the reward function `environment` adds them up.
    reward: float = 0.0
    is_final: bool = False
    tools: Sequence[Mapping[str, Any]] = ()  # JSON schemas that an agent declares before its turns
    begins_context: bool = False  # the messages are all that the policy reads from now on
    max_turn_tokens: int = 0  # the limit of the next turn; 0: the rest of the budget
    stop: Sequence[str] = ()  # texts that end the next turn
    request_key: str = ""  # key of the request that the next turn answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Facts about the episode that an environment may need."""

    sample_id: SampleId  # the id of its prompt and its index in the group
    is_replay: bool  # the episode is built again because its process or the run has ended
    once: Callable[..., Any]  # makes a call once in the life of the sample: `Calls.once`


@runtime_checkable
class Environment(Protocol):
    """One episode. Both methods may be coroutines; other methods run in a thread of their own,
    at the same time as methods of other instances.
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:  # noqa: ANN401
        """Begin. `row` has `prompt` (the text that the model sees), `answer`, `dataset` and
        `environment.columns`; `seed` is the same for all samples of a prompt. Return the
        `Messages` that the policy reads after the prompt and before its first turn, or None.
        """

    def step(self, turn: Turn) -> Any:  # noqa: ANN401
        """Reply to a turn with a `StepResult`."""


@runtime_checkable
class Loads(Protocol):
    """An environment that prepares itself before `reset`."""

    def load(self, context: Context) -> None:
        """Prepare for `reset`."""
