"""Metrics of a rollout: `rollout/*`, and the lengths of the groups it returned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from april_rl.metrics import Histogram, Max, Metric, Metrics, Sum
from april_rl.rollout.dispatch import Sent
from april_rl.rollout.groups import Lost
from april_rl.rollout.ticks import Tick
from april_rl.types import Completion, SampleId, ScoredGroup


class Progress(NamedTuple):
    """The progress of a sample in a step."""

    sample_id: SampleId
    num_tokens: int  # response tokens so far
    is_finished: bool


class StepStats:
    """Measurements of one step's rollout: nothing is decided by them."""

    def __init__(self, *, num_slots: int, policy_version: int, clock: Callable[[], float]) -> None:
        """Start the clock."""
        self.num_slots = num_slots
        self.policy_version = policy_version
        self._clock = clock
        self.started = clock()
        self.ticks: list[Tick] = []
        self.sent: Sequence[Sent] = ()  # known at the end
        # Completions with the time they came back: of ticks, then of the abort.
        self.returned: list[tuple[float, Sequence[Completion]]] = []
        self.progress: list[Progress] = []  # of every sample that had a slot
        self.prompt_tokens = 0  # Σ over them
        self._worked_s: defaultdict[int, float] = defaultdict(float)  # by engine
        self._slot_s = 0.0  # Σ over slots of the time with a request
        self.time_s = 0.0
        self.waited_s = 0.0  # for engines and scores; the rest is the controller's own time
        self.abort_s = 0.0
        self.stop_s = 0.0  # from the end of generation until everything unfinished is parked
        self.score_s = 0.0  # waiting for scores with nothing left to generate
        self.engine_steps = 0
        self.slot_steps = 0
        self.generated_tokens = 0
        self.finished_samples = 0
        self.resumed_samples = 0
        self.kept_samples = 0  # of these, resumed without a prefill
        self.reprefill_tokens = 0
        self.preempted_samples = 0  # times a running sample lost its place in a full KV cache
        self.preempted_tokens = 0  # whose KV cache was lost by that
        self.kv_cache_frac = 0.0  # largest share of an engine's KV cache in use
        self.failed_attempts = 0  # requests that an engine failed, and mostly tried again
        self.rejected_groups = self.dropped_groups = 0  # known at the end
        self.trained_lengths: NDArray[np.int64] = np.empty(0, np.int64)  # response tokens of each
        self._prompt_lengths: list[int] = []
        self._truncated = 0

    def add_returned(self, completions: Sequence[Completion]) -> None:
        """Keep the completions that came back just now."""
        if completions:
            self.returned.append((self._clock(), completions))

    def add_tick(self, tick: Tick, *, engine: int) -> None:
        """Count an engine's tick."""
        self.ticks.append(tick)
        self.add_returned(tick.finished)
        self._worked_s[engine] += tick.elapsed_s
        self._slot_s += tick.elapsed_s * tick.slot_steps / max(tick.engine_steps, 1)
        self.engine_steps += tick.engine_steps
        self.slot_steps += tick.slot_steps
        self.preempted_samples += tick.preempted_samples
        self.preempted_tokens += tick.preempted_tokens
        self.kv_cache_frac = max(self.kv_cache_frac, tick.kv_cache_frac)
        self.failed_attempts += tick.failed_attempts

    def add_completion(self, completion: Completion, *, prompt_tokens: int) -> None:
        """Count a completion; `prompt_tokens` is the length of its prompt."""
        num_tokens = len(completion.token_ids)
        is_finished = completion.finish_reason is not None and not completion.is_failed
        if not (num_tokens or is_finished):
            return  # it never had a slot
        self.progress.append(
            Progress(completion.sample_id, completion.start + num_tokens, is_finished)
        )
        self.prompt_tokens += prompt_tokens
        self.generated_tokens += num_tokens
        self.finished_samples += is_finished
        if completion.start:
            self.resumed_samples += 1
            if completion.is_kept:
                self.kept_samples += 1
            else:
                self.reprefill_tokens += prompt_tokens + completion.start

    def end(self, groups: Sequence[ScoredGroup], *, lost: Lost, sent: Sequence[Sent]) -> None:
        """Stop the clock; record what was lost, what was sent and the lengths of the trained
        groups.
        """
        self.time_s = self._clock() - self.started
        self.rejected_groups, self.dropped_groups = lost.rejected, lost.dropped
        self.sent = sent
        samples = [sample for scored in groups for sample in scored.group.samples]
        self.trained_lengths = np.array([sample.num_tokens for sample in samples], np.int64)
        self._prompt_lengths = [len(scored.group.prompt.token_ids) for scored in groups]
        self._truncated = [sample.finish_reason for sample in samples].count("length")

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since the step's rollout began."""
        return self.time_s or self._clock() - self.started

    @property
    def in_flight_mean(self) -> float:
        """Return the requests in a slot, over all engines, averaged over the whole rollout: slots
        are empty while an engine has nothing to do, scores are awaited or the step stops. The last
        tick of each engine, which ends in the abort, counts as that.
        """
        return self._slot_s / self.time_s if self.time_s else 0.0

    def metrics(self, *, num_needed: int) -> Metrics:
        """Return `rollout/*`; `num_needed` is N·G, the samples that a step needs."""
        return Metrics(
            {
                "rollout/time_s": Sum(self.time_s),
                "rollout/controller_s": Sum(self.time_s - self.waited_s),
                "rollout/abort_s": Sum(self.abort_s),
                "rollout/stop_s": Sum(self.stop_s),
                "rollout/generated_tokens_per_s": self.generated_tokens / self.time_s,
                "rollout/finished_samples_per_s": self.finished_samples / self.time_s,
                "rollout/in_flight_mean": self.in_flight_mean,
                "rollout/occupancy": self.in_flight_mean / self.num_slots,
                "rollout/resumed_samples": Sum(self.resumed_samples),
                "rollout/kept_samples": Sum(self.kept_samples),
                "rollout/reprefill_tokens": Sum(self.reprefill_tokens),
                "rollout/preempted_samples": Sum(self.preempted_samples),
                "rollout/preempted_tokens": Sum(self.preempted_tokens),
                "rollout/kv_cache_frac": Max(self.kv_cache_frac),
                "rollout/failed_attempts": Sum(self.failed_attempts),
                "rollout/rejected_groups": Sum(self.rejected_groups),
                "rollout/dropped_groups": Sum(self.dropped_groups),
                "rollout/over_sampling_factor": self.num_slots / num_needed,
                **self._length_metrics(),
                "rollout/engine_s": sum(self._worked_s.values()) / max(1, len(self._worked_s)),
            }
        )

    def _length_metrics(self) -> dict[str, Metric | float]:
        lengths = self.trained_lengths
        if not len(lengths):
            return {}
        p50, p95, p99 = np.percentile(lengths, (50, 95, 99))
        return {
            "rollout/truncated_frac": self._truncated / len(lengths),
            "rollout/response_tokens_mean": float(lengths.mean()),
            "rollout/response_tokens_p50": float(p50),
            "rollout/response_tokens_p95": float(p95),
            "rollout/response_tokens_p99": float(p99),
            "rollout/response_tokens_max": float(lengths.max()),
            "rollout/prompt_tokens_mean": float(np.mean(self._prompt_lengths)),
            "histogram/response_tokens": Histogram.of(lengths),
        }
