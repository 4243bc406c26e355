"""`rollout/*`: metrics of one step's rollout, and `environment/*` of its turns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from april_rl.metrics import Histogram, Max, Mean, Metric, Metrics, Sum
from april_rl.training.rollout.record import StepRecord
from april_rl.types import ScoredGroup


def rollout_metrics(record: StepRecord, *, num_needed: int) -> Metrics:
    """Return `rollout/*` and its times; `num_needed` is N·G, the samples that a step needs."""
    resumed = [each for each in record.returned if each.is_resumed]
    ticks = [tick for _, tick in record.ticks]
    worked_s: defaultdict[int, float] = defaultdict(float)
    for engine, tick in record.ticks:
        worked_s[engine] += tick.elapsed_s
    lost = record.groups.lost
    return Metrics(
        {
            "rollout/time_s": Sum(record.time_s),
            "time/rollout_s": Sum(record.time_s),
            "time/score_s": Sum(record.waited_s["scores"]),
            "rollout/controller_s": Sum(record.controller_s),
            "rollout/stop_s": Sum(record.stop_s),
            "rollout/generated_tokens_per_s": record.generated_tokens / record.time_s,
            "rollout/finished_samples_per_s": record.finished_samples / record.time_s,
            "rollout/in_flight_mean": record.in_flight_mean,
            "rollout/occupancy": record.in_flight_mean / record.num_slots,
            "rollout/resumed_samples": Sum(len(resumed)),
            "rollout/kept_samples": Sum(sum(each.is_kept for each in resumed)),
            "rollout/reprefill_tokens": Sum(record.reprefill_tokens),
            "rollout/preempted_samples": Sum(sum(tick.preempted_samples for tick in ticks)),
            "rollout/preempted_tokens": Sum(sum(tick.preempted_tokens for tick in ticks)),
            "rollout/kv_cache_frac": Max(max((tick.kv_cache_frac for tick in ticks), default=0.0)),
            "rollout/failed_attempts": Sum(sum(tick.failed_attempts for tick in ticks)),
            "rollout/rejected_groups": Sum(lost.rejected),
            "rollout/dropped_groups": Sum(lost.dropped),
            "rollout/over_sampling_factor": record.num_slots / num_needed,
            **_trained_lengths(record.groups.trained),
            **_of_episodes(record.groups.trained),
            **_empty_slots(record),
            "rollout/engine_s": sum(worked_s.values()) / max(1, len(worked_s)),
        }
    )


def _trained_lengths(groups: Sequence[ScoredGroup]) -> dict[str, Metric | float]:
    if not groups:
        return {}
    samples = [sample for scored in groups for sample in scored.group.samples]
    lengths = np.array([sample.num_tokens for sample in samples], np.int64)
    truncated = sum(sample.finish_reason == "length" for sample in samples)
    prompt_tokens = [len(scored.group.prompt.token_ids) for scored in groups]
    p50, p95, p99 = np.percentile(lengths, (50, 95, 99))
    return {
        "rollout/truncated_frac": truncated / len(lengths),
        "rollout/response_tokens_mean": float(lengths.mean()),
        "rollout/response_tokens_p50": float(p50),
        "rollout/response_tokens_p95": float(p95),
        "rollout/response_tokens_p99": float(p99),
        "rollout/response_tokens_max": float(lengths.max()),
        "rollout/prompt_tokens_mean": float(np.mean(prompt_tokens)),
        "histogram/response_tokens": Histogram.of(lengths),
    }


def _of_episodes(groups: Sequence[ScoredGroup]) -> dict[str, Metric | float]:
    having = (scored.group for scored in groups if scored.group.prompt.has_environment)
    samples = [sample for group in having for sample in group.samples]
    if not samples:
        return {}
    num_turns = sum(span.finish_reason is not None for s in samples for span in s.completions)
    num_contexts = sum(len(sample.context_lengths) for sample in samples)
    return {
        "environment/turns_mean": Mean(num_turns, len(samples)),
        "environment/contexts_mean": Mean(num_contexts, len(samples)),
        "environment/observation_tokens_mean": Mean(
            sum(sample.end - sample.num_tokens for sample in samples), len(samples)
        ),
    }


def _empty_slots(record: StepRecord) -> dict[str, Metric | float]:
    """Return the share of slots that are empty while as many samples wait for an environment."""
    if not record.acts:
        return {}
    changes = [
        *((each.at_s, -len(each.sample_ids), 0) for each in record.sent),
        *((each.at_s, 1, 0) for each in record.returned),
        *((each.begun_s, 0, 1) for each in record.acts),
        *((each.ended_s, 0, -1) for each in record.acts),
    ]
    empty, acting, slot_s, since_s = record.num_slots, 0, 0.0, 0.0
    for at_s, emptied, began in sorted(changes):
        slot_s += (at_s - since_s) * min(max(empty, 0), acting)  # < 0 if samples are queued
        empty, acting, since_s = empty + emptied, acting + began, at_s
    return {"environment/empty_slots_frac": slot_s / (record.num_slots * record.time_s)}
