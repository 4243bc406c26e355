"""What goes to a reward process and what comes back: plain data, so that the controller never has
to import the user's module to unpickle it.

Legend: [n] responses of a job, [R] tokens of a response.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from april_rl.types import ScoreOutcome

Outcome = ScoreOutcome | Literal["refused", "undecoded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The prompt that the responses of a job answer, as far as a reward function may see it."""

    text: str
    answer: str
    dataset: str
    columns: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Responses to one prompt that are scored in one call, as they travel: four bytes a token."""

    asked: Asked
    token_ids: tuple[array[int], ...]  # [n][R], C ints
    truncated: tuple[bool, ...]  # [n]
    whole_group: bool  # for the functions that want whole groups; else for the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Responses:
    """Responses to one prompt, as a reward function sees them."""

    asked: Asked
    texts: Sequence[str]  # [n]
    num_tokens: Sequence[int]  # [n]
    truncated: Sequence[bool]  # [n]

    def argument(self, name: str) -> list[object]:
        """Return what a function gets that asks for `name`: one value a response [n].

        Raises LookupError when the data has no such column.
        """
        reserved = {"num_tokens": self.num_tokens, "truncated": self.truncated}
        if name in reserved:
            return list(reserved[name])
        if name == "datasets":
            return [self.asked.dataset] * len(self.texts)
        if name not in self.asked.columns:
            raise LookupError(f"the data has no column {name!r}")
        return [self.asked.columns[name]] * len(self.texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """A response on whose answer math-verify and the comparison of texts differ."""

    expected: str
    stated: str
    value: float  # what math-verify says


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one reward function says of one response.

    `no_score`: the function has no value for it. `crash`: the function raised, or its process died
    (without a name then). `refused`: the function itself is at fault, whatever the response;
    `message` says how, as the end of a sentence that begins with its name. `undecoded`: no function
    was called, for want of a text; `message` says why.
    """

    outcome: Outcome
    name: str = ""  # of the function
    value: float = math.nan
    message: str = ""
    disagreement: Disagreement | None = None

    @property
    def has_value(self) -> bool:
        """Whether `value` means anything."""
        return self.outcome in ("scored", "soft_timeout")

    @property
    def reason(self) -> str:
        """Why there is no value, for people."""
        raised = "raised " if self.name and self.outcome == "crash" else ""
        return f"{self.name} {raised}{self.message}".strip()
