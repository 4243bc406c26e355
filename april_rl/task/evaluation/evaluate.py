"""Evaluate held-out sets: figures and a record of every sample."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from april_rl.metrics import Metric, Metrics, Sum
from april_rl.run.tracking.samples_file import EvaluationRecord
from april_rl.run.tracking.terminal import ProgressPhase
from april_rl.run.tracking.tracker import Tracker
from april_rl.task.evaluation.evaluator import Evaluator
from april_rl.task.evaluation.figures import set_report
from april_rl.task.evaluation.held_out import HeldOut, ScoredSet
from april_rl.task.evaluation.report import SetReport


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedSet:
    """An evaluated set: its report, and a record of every sample."""

    held_out: HeldOut
    report: SetReport
    records: tuple[EvaluationRecord, ...]  # [P · k]


def evaluate(
    held_out: HeldOut,
    evaluator: Evaluator,
    *,
    decode: Callable[[Sequence[int]], str],
    on_progress: Callable[[int], None],
) -> EvaluatedSet:
    """Sample, score and estimate a held-out set; call `on_progress` with the number of finished
    samples.

    Raises EvaluationError when samples are missing or no prompt has a reward for each of its
    samples.
    """
    outcome = evaluator.run(held_out, on_progress)
    responses = [decode(sample.token_ids) for sample in outcome.samples]
    read = held_out.answer_of
    prompts = (sample.prompt.text for sample in outcome.samples)
    answers = None if read is None else list(map(read, prompts, responses))
    return EvaluatedSet(
        held_out=held_out,
        report=set_report(outcome, answers),
        records=tuple(_records(outcome, responses, answers)),
    )


def evaluate_all(
    sets: Iterable[HeldOut],
    evaluator: Evaluator,
    *,
    decode: Callable[[Sequence[int]], str],
    tracker: Tracker,
    policy_version: int,
    show: Callable[[ProgressPhase, int], None],
) -> Metrics:
    """Evaluate every set, save its samples with `tracker`, and return `eval/*` and the time.

    `show` is called with the phase and the number of finished samples.
    """
    values: dict[str, Metric] = {}
    started = time.perf_counter()
    for held_out in sets:
        name = held_out.name
        with tracker.phase(f"evaluating {name}", held_out.num_responses) as phase:
            evaluated = evaluate(
                held_out, evaluator, decode=decode, on_progress=partial(show, phase)
            )
        tracker.evaluation(policy_version, name, evaluated.records)
        values |= evaluated.report.metrics(name)
    evaluator.end()
    return Metrics({**values, "time/evaluation_s": Sum(time.perf_counter() - started)})


def _records(
    outcome: ScoredSet, responses: Sequence[str], answers: Sequence[str | None] | None
) -> list[EvaluationRecord]:
    found = []
    rewards = outcome.rewards.ravel().tolist()
    for place, (sample, reward) in enumerate(zip(outcome.samples, rewards, strict=True)):
        assert sample.finish_reason is not None, sample.id
        found.append(
            EvaluationRecord(
                prompt_id=-1 - sample.prompt.id,
                index=sample.index,
                prompt=sample.prompt.text,
                response=responses[place],
                answer=sample.prompt.answer,
                stated=None if answers is None else answers[place],
                reward=None if math.isnan(reward) else reward,
                finish_reason=sample.finish_reason,
                num_tokens=sample.num_tokens,
                source=sample.prompt.source,
            )
        )
    return found
