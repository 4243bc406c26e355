"""Jobs for reward processes and their results: plain data, so that the controller never imports the
user's module to unpickle it.

Legend: [n] responses of a job, [R] tokens of a response.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from april_rl.answers.extraction import THINK_END, opens_thinking
from april_rl.errors import RunError
from april_rl.types import Prompt, SampleId, Score

_CHARACTERS_PER_TOKEN = 4  # typical of English, for functions that look at the length


class RewardError(RunError, RuntimeError):
    """No response can be scored, so the run cannot continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Responses to one prompt that are scored in one call, in transit: four bytes per token."""

    prompt: Prompt  # without its tokens, as in `DecodedJob`
    sample_ids: tuple[SampleId, ...]  # [n]
    token_ids: tuple[array[int], ...]  # [n][R], C ints
    truncated: tuple[bool, ...]  # [n]
    environment_rewards: tuple[float, ...]  # the sum over the turns of each [n]
    whole_group: bool  # whether this is for the functions that take whole groups, or for the others


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedJob:
    """A job with texts instead of token ids, as a reward function sees it."""

    prompt: Prompt
    sample_ids: Sequence[SampleId]  # [n]
    texts: Sequence[str]  # [n]
    num_tokens: Sequence[int]  # [n]
    truncated: Sequence[bool]  # [n]
    environment_rewards: Sequence[float]  # [n]

    @classmethod
    def of(cls, prompt: Prompt, texts: Sequence[str]) -> DecodedJob:
        """Return a job for responses that are given as text, whose lengths in tokens are estimated
        as a fourth of the lengths in characters. They follow the thoughts that a prompt begins.
        """
        if opens_thinking(prompt.text):
            texts = [text if THINK_END in text else f"{THINK_END}\n{text}" for text in texts]
        return cls(
            prompt=replace(prompt, token_ids=()),
            sample_ids=[SampleId(prompt.id, index) for index in range(len(texts))],
            texts=tuple(texts),
            num_tokens=[1 + len(text) // _CHARACTERS_PER_TOKEN for text in texts],
            truncated=[False] * len(texts),
            environment_rewards=[0.0] * len(texts),
        )

    def argument(self, name: str) -> list[object]:
        """Return argument `name` of a function, one value per response [n]; raise LookupError."""
        reserved: Mapping[str, Sequence[object]] = {
            "num_tokens": self.num_tokens,
            "truncated": self.truncated,
            "environment_rewards": self.environment_rewards,
            "datasets": [self.prompt.dataset] * len(self.texts),
        }
        if name in reserved:
            return list(reserved[name])
        if name not in self.prompt.columns:
            raise LookupError(f"the data has no column {name!r}")
        return [self.prompt.columns[name]] * len(self.texts)


class About(NamedTuple):
    """Facts of a loaded function that the controller needs."""

    columns: tuple[str, ...]  # data columns that it takes in addition to prompt and answer
    note: str  # note for the user, for example which sandbox is used; may be empty


class Result(NamedTuple):
    """Reply of a reward process to a job."""

    scores: list[list[Score]]  # scores of each response [n] by the functions that were called
    states: Mapping[str, str]  # JSON by function, only for functions with a state
