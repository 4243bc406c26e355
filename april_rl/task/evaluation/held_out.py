"""A held-out set and the outcome of sampling it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from april_rl.errors import RunError
from april_rl.task.evaluation.settings import SetSampling
from april_rl.types import Prompt, Sample

AnswerOf = Callable[[str, str], str | None]  # of a prompt and a response, as texts


class EvaluationError(RunError):
    """A set cannot be evaluated: samples are missing, or no prompt has a reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Held-out prompts and how to sample responses to them."""

    name: str
    path: str  # the file or id of the prompts
    prompts: Sequence[Prompt]  # [P]
    sampling: SetSampling
    function: str  # name of the reward function that decides whether a sample is right
    answer_of: AnswerOf | None  # reads the answer of a response; None: no majority vote

    @property
    def num_responses(self) -> int:
        return len(self.prompts) * self.sampling.num_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSet:
    """Every response to a held-out set with its reward."""

    held_out: HeldOut
    samples: tuple[Sample, ...]  # [P · k], by prompt and index in the group
    rewards: NDArray[np.float64]  # [P, k]; NaN: the reward or the engine failed
