"""The figures of an evaluated set, with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from april_rl.metrics import Metrics
from april_rl.task.evaluation.estimators import averages, majorities, passes
from april_rl.task.evaluation.held_out import EvaluationError, ScoredSet
from april_rl.task.evaluation.intervals import Estimate, estimate
from april_rl.types import Observation, Sample

Values = NDArray[np.float64]  # [S], one value for each prompt with k rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of an evaluated set.

    A prompt is left out if any of its samples has no reward, because a failed reward says nothing
    about the model.
    """

    scored: tuple[int, ...]  # [S], indices of the prompts with k rewards
    averages: Values
    passes: Values
    majorities: Values | None  # None: no function reads an answer from a response
    num_prompts: int
    errors: int  # number of samples without a reward
    response_tokens_mean: float  # over all samples
    truncated_frac: float  # over all samples

    @property
    def num_left_out(self) -> int:
        return self.num_prompts - len(self.scored)

    def values(self) -> dict[str, Values]:
        """Return avg_at_k, pass_at_k and, if there are votes, maj_at_k of each scored prompt."""
        found = {"avg_at_k": self.averages, "pass_at_k": self.passes, "maj_at_k": self.majorities}
        return {key: values for key, values in found.items() if values is not None}

    def estimates(self) -> dict[str, Estimate]:
        """Return the mean of each of `values`, with its interval."""
        return {key: estimate(values) for key, values in self.values().items()}

    def metrics(self, name: str) -> Metrics:
        """Return `eval/<name>/*`, each estimate with the ends of its interval."""
        found: dict[str, float] = {}
        for key, (value, low, high) in self.estimates().items():
            found |= {key: value, f"{key}_low": low, f"{key}_high": high}
        found |= {
            "response_tokens_mean": self.response_tokens_mean,
            "truncated_frac": self.truncated_frac,
            "errors": float(self.errors),
            "left_out_prompts": float(self.num_left_out),
        }
        return Metrics({f"eval/{name}/{key}": value for key, value in found.items()})


def figures(outcome: ScoredSet, answers: Sequence[str | None] | None) -> Figures:
    """Return the figures of a set.

    `answers` [P · k] are read from the responses; None if no function reads them. Raises
    EvaluationError when no prompt has a reward for each of its samples.
    """
    rewards, held_out = outcome.rewards, outcome.held_out
    is_missing = np.isnan(rewards)
    scored = np.flatnonzero(~is_missing.any(axis=1))
    if not scored.size:
        raise EvaluationError(
            f"evaluation.sets.{held_out.name}: each of its {len(rewards)} prompts has a sample "
            f"without a reward ({int(is_missing.sum())} of {rewards.size} samples failed): "
            f"{_reason(outcome.samples)}"
        )
    k = held_out.sampling.num_samples
    kept = rewards[scored]
    return Figures(
        scored=tuple(scored.tolist()),
        averages=averages(kept),
        passes=passes(kept, k=k),
        majorities=None
        if answers is None
        else majorities(kept, [answers[row * k : (row + 1) * k] for row in scored]),
        num_prompts=len(rewards),
        errors=int(is_missing.sum()),
        response_tokens_mean=float(np.mean([sample.num_tokens for sample in outcome.samples])),
        truncated_frac=float(
            np.mean([sample.finish_reason == "length" for sample in outcome.samples])
        ),
    )


def _reason(samples: Sequence[Sample]) -> str:
    """Return what made a sample fail, or where to look."""
    last = (span for sample in samples for span in sample.spans[-1:])
    failures = (span.failure for span in last if isinstance(span, Observation) and span.failure)
    return next(failures, "check the reward function and its limits (reward.*)")
