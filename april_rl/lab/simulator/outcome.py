"""Totals of a simulated run, in real samples and tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean

from april_rl.lab.simulator.length_statistics import dispersion
from april_rl.training.rollout.collector import Collection


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Numbers of real tokens, groups and engines for each simulated one."""

    tokens: float = 1.0
    groups: float = 1.0
    engines: float = 1.0


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Totals over the counted steps of a simulated run, in real samples and tokens."""

    num_steps: int = 0
    rollout_s: float = 0.0  # sum over all steps
    rest_s: float = 0.0  # sum over all steps
    trained_samples: float = 0.0
    finished_samples: float = 0.0
    generated_tokens: float = 0.0
    reprefill_tokens: float = 0.0
    rejected_groups: float = 0.0
    peak_kv_tokens: int = 0  # most tokens that one engine held, running and kept
    peak_parked_tokens: int = 0  # most response tokens that the buffer held between two steps
    slot_s: float = 0.0  # Σ over steps of slots times seconds
    busy_slot_s: float = 0.0  # the part of slot_s in which the slot has a request
    factor: float = 1.0  # α
    # Lengths of the trained responses, as simulated.
    tokens_by_age: Counter[int] = field(default_factory=Counter)
    # For each step, the mean response length of each trained group.
    group_lengths: list[list[float]] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        """Return the mean seconds of a step, including the update."""
        return (self.rollout_s + self.rest_s) / self.num_steps

    @property
    def trained_samples_per_s(self) -> float:
        return self.trained_samples / self.rollout_s

    @property
    def generated_tokens_per_s(self) -> float:
        return self.generated_tokens / self.rollout_s

    @property
    def occupancy(self) -> float:
        return self.busy_slot_s / self.slot_s

    @property
    def reprefill_per_generated_token(self) -> float:
        return self.reprefill_tokens / max(1, self.generated_tokens)

    @property
    def off_policy_token_frac(self) -> float:
        return 1 - self.tokens_by_age[0] / max(1, self.tokens_by_age.total())

    @property
    def age_mean(self) -> float:
        """Return the mean age of the trained tokens, in policy versions."""
        total = sum(age * count for age, count in self.tokens_by_age.items())
        return total / max(1, self.tokens_by_age.total())

    @property
    def age_max(self) -> int:
        """Return the largest age of a trained token, in policy versions. It exceeds the cap only
        where such tokens are masked.
        """
        return max(self.tokens_by_age, default=0)

    def figures(self) -> dict[str, float]:
        return {
            "step_s": self.step_s,
            "rollout_s": self.rollout_s / self.num_steps,
            "trained_samples_per_s": self.trained_samples_per_s,
            "finished_samples_per_s": self.finished_samples / self.rollout_s,
            "generated_tokens_per_s": self.generated_tokens_per_s,
            "off_policy_token_frac": self.off_policy_token_frac,
            "age_mean": self.age_mean,
            "age_max": self.age_max,
            "reprefill_per_generated_token": self.reprefill_per_generated_token,
            "rejected_groups_per_step": self.rejected_groups / self.num_steps,
            "occupancy": self.occupancy,
            "peak_kv_tokens": self.peak_kv_tokens,
            "peak_parked_tokens": self.peak_parked_tokens,
            "over_sampling_factor": self.factor,
            **({} if (found := dispersion(self.group_lengths)) is None else {"dispersion": found}),
        }

    def add(self, collection: Collection, *, policy_version: int, scale: Scale) -> None:
        """Count one step, collected with `policy_version`."""
        record = collection.record
        self.num_steps += 1
        self.rollout_s += record.time_s
        self.finished_samples += scale.groups * record.finished_samples
        self.generated_tokens += scale.groups * scale.tokens * record.generated_tokens
        self.reprefill_tokens += scale.groups * scale.tokens * record.reprefill_tokens
        self.rejected_groups += scale.groups * record.groups.lost.rejected
        self.slot_s += record.num_slots * record.time_s
        self.busy_slot_s += record.in_flight_mean * record.time_s
        self.group_lengths.append(
            [fmean(s.num_tokens for s in scored.group.samples) for scored in collection.groups]
        )
        for scored in collection.groups:
            self.trained_samples += scale.groups * len(scored.group.samples)
            for completion in (c for s in scored.group.samples for c in s.completions):
                age = policy_version - completion.policy_version
                self.tokens_by_age[age] += len(completion.token_ids)
