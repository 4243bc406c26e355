"""Jobs for reward processes and their results: plain data, so that the controller never imports the
user's module to unpickle it.

Legend: [n] responses of a job, [R] tokens of a response.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from april_rl.types import Prompt, ScoreOutcome

Outcome = ScoreOutcome | Literal["refused", "undecoded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPrompt:
    """The part of a prompt that a reward function may see."""

    text: str
    answer: str
    dataset: str
    columns: Mapping[str, object]

    @classmethod
    def of(cls, prompt: Prompt) -> RewardPrompt:
        """Return the part of `prompt` that a reward function may see."""
        return cls(
            text=prompt.text, answer=prompt.answer, dataset=prompt.dataset, columns=prompt.columns
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Responses to one prompt that are scored in one call, in transit: four bytes per token."""

    prompt: RewardPrompt
    token_ids: tuple[array[int], ...]  # [n][R], C ints
    truncated: tuple[bool, ...]  # [n]
    whole_group: bool  # for the functions that want whole groups, or for the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Responses:
    """Responses to one prompt, as a reward function sees them."""

    prompt: RewardPrompt
    texts: Sequence[str]  # [n]
    num_tokens: Sequence[int]  # [n]
    truncated: Sequence[bool]  # [n]

    def argument(self, name: str) -> list[object]:
        """Return the value of the argument `name` of a function: one value per response [n].

        Raise LookupError when the data has no such column.
        """
        reserved = {"num_tokens": self.num_tokens, "truncated": self.truncated}
        if name in reserved:
            return list(reserved[name])
        if name == "datasets":
            return [self.prompt.dataset] * len(self.texts)
        if name not in self.prompt.columns:
            raise LookupError(f"the data has no column {name!r}")
        return [self.prompt.columns[name]] * len(self.texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of one reward function for one response.

    `no_score`: the function has no value for it. `crash`: the function raised, or its process died
    (then `name` is empty). `refused`: the function itself is at fault, whatever the response;
    `message` continues a sentence that begins with its name. `undecoded`: no function was called
    because there was no text; `message` says why.
    """

    outcome: Outcome
    name: str = ""  # of the function
    value: float | None = None  # None: there is none
    message: str = ""

    @property
    def reason(self) -> str:
        """Return why there is no value, for messages."""
        raised = "raised " if self.name and self.outcome == "crash" else ""
        return f"{self.name} {raised}{self.message}".strip()


class About(NamedTuple):
    """What the controller must know of a function that is loaded."""

    columns: tuple[str, ...]  # data columns that it takes besides prompt and answer
    note: str  # for the user, for example which sandbox is used; may be empty


class Result(NamedTuple):
    """What comes back for a job."""

    verdicts: list[list[Verdict]]  # of each function on each response [n]
    states: Mapping[str, str]  # JSON, by function: of those that were called and have one
