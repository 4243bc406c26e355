"""The figures of a run that a comparison shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from april_rl.lab.report.run_files import RunFiles


class AccuracyPoint(NamedTuple):
    """A held-out accuracy, and the cost of training up to it."""

    samples: int  # trained
    tokens: float  # trained
    seconds: float  # time of training steps, without evaluations and checkpoints
    accuracy: float
    high: float  # upper end of the 95 % interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The samples and seconds that all compared runs have spent, and the accuracy to reach."""

    samples: float
    seconds: float
    accuracy: float
    evaluation_set: str


class Figure(NamedTuple):
    """One row of a comparison."""

    label: str
    value: Callable[[RunFiles, Budget], float | None]
    write: Callable[[float], str]
    is_share: bool = False  # compared by difference, not by ratio
    is_to_accuracy: bool = False  # a cost until the accuracy is reached


def evaluations(run: RunFiles, name: str) -> list[AccuracyPoint]:
    """Return every accuracy of a held-out set, in order."""
    seconds = accumulate(row.get("time/step_s") or 0.0 for row in run.rows)
    trained = accumulate(run.trained_samples)
    tokens_of = accumulate(row.get("throughput/trained_tokens") or 0.0 for row in run.rows)
    key = f"eval/{name}/avg_at_k"
    return [
        AccuracyPoint(samples, tokens, spent_s, accuracy, row.get(f"{key}_high") or accuracy)
        for row, samples, tokens, spent_s in zip(run.rows, trained, tokens_of, seconds, strict=True)
        if (accuracy := row.get(key)) is not None
    ]


def best_accuracy(run: RunFiles, name: str) -> float:
    """Return the highest accuracy of the run; 0 without an evaluation."""
    return max((each.accuracy for each in evaluations(run, name)), default=0.0)


def begins_within(run: RunFiles, budget: Budget) -> bool:
    """Return whether the accuracy to reach lies within the 95 % interval of the run's first
    evaluation, so that chance alone may reach it.
    """
    found = evaluations(run, budget.evaluation_set)
    return bool(found) and budget.accuracy <= found[0].high


def first_cost_to(
    run: RunFiles, budget: Budget, cost: Callable[[AccuracyPoint], float]
) -> float | None:
    """Return the cost until the run first reached the accuracy, interpolated between two
    evaluations; None if it never did.
    """
    found = evaluations(run, budget.evaluation_set)
    if found and found[0].accuracy >= budget.accuracy:
        return cost(found[0])
    for before, after in pairwise(found):
        if after.accuracy >= budget.accuracy:
            part = (budget.accuracy - before.accuracy) / (after.accuracy - before.accuracy)
            return cost(before) + part * (cost(after) - cost(before))
    return None


def _cost(name: str) -> Callable[[RunFiles, Budget], float | None]:
    return lambda run, budget: first_cost_to(run, budget, attrgetter(name))


def _accuracy_after_samples(run: RunFiles, budget: Budget) -> float | None:
    found = [e for e in evaluations(run, budget.evaluation_set) if e.samples <= budget.samples]
    return found[-1].accuracy if found else None


def _accuracy_after_seconds(run: RunFiles, budget: Budget) -> float | None:
    """Return the accuracy after equal time. It is interpolated because runs are evaluated by
    steps, not by time.
    """
    found = evaluations(run, budget.evaluation_set)
    if not found:
        return None
    times, accuracies = [e.seconds for e in found], [e.accuracy for e in found]
    return float(np.interp(budget.seconds, times, accuracies))


def _rate(run: RunFiles, _: Budget) -> float | None:
    seconds = run.total("time/step_s")
    return sum(run.trained_samples) / seconds if seconds else None


def _mean_of(key: str) -> Callable[[RunFiles, Budget], float | None]:
    return lambda run, _: run.mean(key)


def _largest(key: str, *, unit: float = 1.0) -> Callable[[RunFiles, Budget], float | None]:
    return lambda run, _: max(found) / unit if (found := run.values(key)) else None


def _step_seconds(percentile: float) -> Callable[[RunFiles, Budget], float | None]:
    def value(run: RunFiles, _: Budget) -> float | None:
        seconds = run.values("time/step_s")
        return float(np.percentile(seconds, percentile)) if seconds else None

    return value


def _sum_of_products(run: RunFiles, rate: str, seconds: str) -> float:
    return sum((row.get(rate) or 0.0) * (row.get(seconds) or 0.0) for row in run.rows)


def _generated_tokens(run: RunFiles) -> float:
    return _sum_of_products(run, "rollout/generated_tokens_per_s", "rollout/time_s")


def _idle(run: RunFiles, _: Budget) -> float | None:
    seconds = run.total("rollout/time_s")
    busy = _sum_of_products(run, "rollout/occupancy", "rollout/time_s")
    return 1 - busy / seconds if seconds else None


def _awaiting_scores(run: RunFiles, _: Budget) -> float | None:
    seconds = run.total("rollout/time_s")
    return run.total("time/score_s") / seconds if seconds else None


def _waste(run: RunFiles, _: Budget) -> float | None:
    generated = _generated_tokens(run)
    trained = _sum_of_products(run, "throughput/trained_tokens_per_s", "time/step_s")
    return 1 - trained / generated if generated and trained else None


def _reprefill_share(run: RunFiles, _: Budget) -> float | None:
    generated = _generated_tokens(run)
    return run.total("rollout/reprefill_tokens") / generated if generated else None


def _number(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:,.{digits}f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


FIGURES: tuple[Figure, ...] = (
    Figure("seconds to the accuracy", _cost("seconds"), _number(1), is_to_accuracy=True),
    Figure("trained samples to the accuracy", _cost("samples"), _number(0), is_to_accuracy=True),
    Figure("accuracy after equal samples", _accuracy_after_samples, _number(3), is_share=True),
    Figure("accuracy after equal time", _accuracy_after_seconds, _number(3), is_share=True),
    Figure("trained samples/s", _rate, _number(1)),
    Figure("step, seconds, p50", _step_seconds(50), _number(2)),
    Figure("step, seconds, p95", _step_seconds(95), _number(2)),
    Figure("step, seconds, p99", _step_seconds(99), _number(2)),
    Figure("largest worker, GiB", _largest("memory/worker_rss_bytes", unit=2**30), _number(2)),
    Figure("fullest GPU", _largest("memory/gpu_used_frac"), _percent, is_share=True),
    Figure("slots that wait during a rollout", _idle, _percent, is_share=True),
    Figure("rollout that waits for rewards alone", _awaiting_scores, _percent, is_share=True),
    Figure("off-policy tokens", _mean_of("staleness/off_policy_token_frac"), _percent, True),
    Figure("mean age of a token", _mean_of("staleness/age_mean"), _number(2), True),
    Figure("generated, never trained", _waste, _percent, is_share=True),
    Figure("prefilled again ÷ generated", _reprefill_share, _percent, is_share=True),
    Figure("response tokens, p50", _mean_of("rollout/response_tokens_p50"), _number(0)),
    Figure("response tokens, p95", _mean_of("rollout/response_tokens_p95"), _number(0)),
    Figure("response tokens, p99", _mean_of("rollout/response_tokens_p99"), _number(0)),
)
