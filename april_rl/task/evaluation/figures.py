"""The figures of an evaluated set, with their intervals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from april_rl.task.evaluation.estimators import averages, majorities, passes
from april_rl.task.evaluation.held_out import EvaluationError, ScoredSet
from april_rl.task.evaluation.intervals import estimate
from april_rl.task.evaluation.report import PromptValues, SetReport
from april_rl.types import Observation, Sample


def set_report(outcome: ScoredSet, answers: Sequence[str | None] | None) -> SetReport:
    """Return the report of a set. A prompt is left out if any of its samples has no reward, because
    a failed reward says nothing about the model.

    `answers` [P · k] are read from the responses; None if no function reads them. Raises
    EvaluationError when no prompt has a reward for each of its samples.
    """
    rewards, held_out = outcome.rewards, outcome.held_out
    is_missing = np.isnan(rewards)
    scored = np.flatnonzero(~is_missing.any(axis=1))  # [S], the prompts with k rewards
    if not scored.size:
        raise EvaluationError(
            f"evaluation.sets.{held_out.name}: each of its {len(rewards)} prompts has a sample "
            f"without a reward ({int(is_missing.sum())} of {rewards.size} samples failed): "
            f"{_reason(outcome.samples)}"
        )
    k = held_out.sampling.num_samples
    kept = rewards[scored]
    values = {"avg_at_k": averages(kept), "pass_at_k": passes(kept, k=k)}  # each [S]
    if answers is not None:
        stated = [answers[row * k : (row + 1) * k] for row in scored]
        values["maj_at_k"] = majorities(kept, stated)
    return SetReport(
        path=held_out.path,
        sampling=held_out.sampling,
        num_prompts=len(rewards),
        estimates={key: estimate(of_key) for key, of_key in values.items()},
        response_tokens_mean=float(np.mean([sample.num_tokens for sample in outcome.samples])),
        truncated_frac=float(
            np.mean([sample.finish_reason == "length" for sample in outcome.samples])
        ),
        errors=int(is_missing.sum()),
        left_out_prompts=len(rewards) - len(scored),
        prompts=tuple(
            PromptValues(
                source=held_out.prompts[row].source,
                answer=held_out.prompts[row].answer,
                values={key: float(of_key[place]) for key, of_key in values.items()},
            )
            for place, row in enumerate(scored.tolist())
        ),
    )


def _reason(samples: Sequence[Sample]) -> str:
    """Return what made a sample fail, or where to look."""
    last = (span for sample in samples for span in sample.spans[-1:])
    failures = (span.failure for span in last if isinstance(span, Observation) and span.failure)
    return next(failures, "check the reward function and its limits (reward.*)")
