"""Messages between the controller and a process with environments: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from april_rl.environments.protocol import StepResult, Turn
from april_rl.errors import RunError
from april_rl.types import SampleId

Outcome = Literal["answered", "error", "timeout"]


class EnvironmentFailedError(RunError, RuntimeError):
    """No episode can be run, so the run cannot go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A question to an episode: its first words, or the answer to its last turn."""

    number: int
    sample_id: SampleId
    # To begin the episode, or to build it again by all of `turns`; None: it lives in the process.
    row: Mapping[str, Any] | None
    seed: int
    turns: tuple[Turn, ...]  # that are not answered yet
    anew: bool = False  # an episode that was lost begins again: its calls are made again


class LetGo(NamedTuple):
    """Order to forget an episode."""

    sample_id: SampleId


class Ready(NamedTuple):
    """First message of a process: it has loaded the class, or failed to."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The results of the calls that a question took, in order: of `reset`, if the episode was begun
    by it, and of `step` for each turn.
    """

    number: int
    results: tuple[StepResult, ...]  # with a list of messages each
    outcome: Outcome
    message: str  # why there is no answer; empty if there is one
    elapsed_s: float  # of the last call of a method
    num_calls: int = 0  # that `Context.once` made
    num_repeated: int = 0  # of these, further attempts
    num_hung: int = 0  # calls in the process that took too long and have not returned yet
