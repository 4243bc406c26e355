"""What a run would be with another over-sampling factor: the collector's schedule, in numbers.

`simulate` knows every rule and plays every engine step; this knows the ones that decide throughput
and staleness and costs milliseconds, so that a run can ask it every few steps. Time within a step
is counted in engine steps: each sample in a slot gains a token in one.

Legend: [K] groups in the order of their opening, [G] samples of a group, [Q] samples that are in
flight or queue in a step.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

from april_rl.tuning.engine_cost import EngineCost

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# From an empty buffer until as much comes in from earlier steps as goes out to later ones.
_WARM_UP_STEPS = 8
# What is measured: this many samples, and at least so many steps.
_MEASURED_SAMPLES, _MEASURED_STEPS = 4096, 12
_NEARLY_ALL = 95  # percent: a maximum would depend on how many steps are played
_NO_VERSION = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How the collector schedules; what `Collector` is given."""

    num_groups: int  # N
    group_size: int  # G
    refill: bool
    max_staleness: int
    finish_stale: bool
    tick_steps: int
    num_engines: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the engines are asked for, and what it costs them."""

    lengths: Floats  # [K, G] response tokens
    is_kept: NDArray[np.bool_]  # [K] whether the filter keeps the group
    prompt_tokens: float  # mean, of a group
    reprefill_frac: float  # of the resumed samples, those that have to be prefilled
    cost: EngineCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The steady state with one α."""

    factor: float
    samples_per_s: float  # trained samples ÷ seconds of rollout
    off_policy_frac: float  # of the trained tokens
    staleness: float  # mean over trained groups
    context_tokens: float  # held by the samples in slots, on all engines, in 95 % of the time


def blend(old: Forecast, new: Forecast, *, weight: float) -> Forecast:
    """`weight` of the new one and the rest of the old one, for one α."""
    mixed = {
        name: (1 - weight) * before + weight * now
        for (name, before), now in zip(asdict(old).items(), asdict(new).values(), strict=True)
    }
    return Forecast(**mixed)


def num_steps(rules: Rules) -> int:
    """Steps that a forecast plays."""
    measured = _MEASURED_SAMPLES // (rules.num_groups * rules.group_size)
    return _WARM_UP_STEPS + min(max(_MEASURED_STEPS, measured), 4 * _MEASURED_STEPS)


def num_groups_played(rules: Rules, *, kept_frac: float) -> int:
    """Groups that no forecast comes to the end of, K, when the filter keeps `kept_frac`."""
    trained = num_steps(rules) * rules.num_groups
    return math.ceil((trained + (rules.max_staleness + 2) * rules.num_groups) / kept_frac)


def forecast(rules: Rules, work: Work, *, factor: float) -> Forecast:
    """What a run in its steady state does with α = `factor`; the groups of `work` have to suffice
    (`num_groups_played`).
    """
    schedule = _Schedule(rules, work, num_slots=round(factor * rules.num_groups * rules.group_size))
    for version in range(_WARM_UP_STEPS):
        schedule.step(version)
    done = schedule.done = _Done()
    for version in range(_WARM_UP_STEPS, num_steps(rules)):
        schedule.step(version)
    # In the steady state as many tokens are trained or rejected as are generated; counting trained
    # samples would say the same with the noise of what the last step leaves behind.
    trained_per_token = float(work.is_kept.mean() / work.lengths.mean())
    return Forecast(
        factor=factor,
        samples_per_s=done.generated * trained_per_token / max(done.seconds, 1e-12),
        off_policy_frac=done.off_policy_tokens / max(done.tokens, 1.0),
        staleness=done.staleness / max(done.groups, 1),
        context_tokens=float(np.percentile(done.context_tokens, _NEARLY_ALL)),
    )


@dataclass(slots=True)
class _Done:
    """What was trained, and in how many seconds."""

    seconds: float = 0.0
    generated: float = 0.0  # tokens
    groups: int = 0
    tokens: float = 0.0
    off_policy_tokens: float = 0.0
    staleness: float = 0.0  # Σ over groups
    context_tokens: list[float] = field(default_factory=list)  # at moments of every step


class _Slots:
    """C slots, each with the engine step it falls free at."""

    def __init__(self, num_slots: int) -> None:
        """All free at once."""
        self._free = [0.0] * num_slots

    @property
    def free_at(self) -> float:
        """When the next sample could start."""
        return self._free[0]

    def place(self, num_steps: Sequence[float]) -> list[float]:
        """The samples, each in the first slot that is free; returns when they start."""
        free, starts = self._free, []
        for steps in num_steps:
            starts.append(free[0])
            heapq.heapreplace(free, free[0] + steps)
        return starts


class _Schedule:
    """A run without engine, scorer and prompts."""

    def __init__(self, rules: Rules, work: Work, *, num_slots: int) -> None:
        """Nothing in flight."""
        self._rules, self._work, self._num_slots = rules, work, num_slots
        self._max_alive = rules.num_groups * (rules.max_staleness + 1)
        num_groups = len(work.lengths)
        self._left = work.lengths.copy()  # [K, G]
        self._oldest = np.full(num_groups, _NO_VERSION)  # [K] version of the oldest token
        self._before = np.zeros(num_groups)  # [K] tokens of steps before the one it completed in
        self._totals = work.lengths.sum(axis=1)  # [K] tokens
        self._num_opened = 0
        self._ready: list[tuple[int, int, int]] = []  # oldest version, group, completed in
        self.done = _Done()

    def step(self, version: int) -> None:
        """One collect."""
        group_size, opened = self._rules.group_size, self._num_opened
        need = self._rules.num_groups - len(self._ready)
        held = np.flatnonzero(self._left[:opened] > 0)
        slots = _Slots(self._num_slots)
        starts = slots.place(self._left.ravel()[held].tolist())
        groups, ends = _completed(held // group_size, starts + self._left.ravel()[held])
        ready = sorted(ends[self._work.is_kept[groups]].tolist())
        starts += self._open(slots, ready, need=need)
        known = bisect_left(ready, math.inf)
        last = ready[min(need, known) - 1] if need > 0 and known else 0.0
        until = max(last, self._waits_until(groups, ends, version))
        new = np.arange(opened * group_size, self._num_opened * group_size)
        samples = np.concatenate([held, new])
        begins = np.asarray(starts)
        for share in (0.25, 0.5, 0.75, 1.0):
            self._hold(samples, begins, at=max(share * last, 1.0))
        # The tick in which it is enough is computed to its end, and the one that is launched.
        tick_steps = self._rules.tick_steps
        until = (math.ceil(until / tick_steps) + 1) * tick_steps if until else 0.0
        all_ends = (begins + self._left.ravel()[samples])[begins < until]
        until = min(until, float(all_ends.max())) if len(all_ends) else 0.0
        self._compute(samples, begins, version=version, until=until)
        self._train(version)

    def _open(self, slots: _Slots, ready: list[float], *, need: int) -> list[float]:
        """When the samples of new groups start, until `need` groups are ready or none may be
        opened; adds to `ready` when the new ones will be.
        """
        if need <= 0:
            return []
        alive = len(self._ready) + len(ready)
        num_held = int((self._left[: self._num_opened] > 0).sum())
        allowance = math.inf if self._rules.refill else float(self._num_slots - num_held)
        lookahead = self._num_slots // 4  # samples that queue behind the slots when it is enough
        starts: list[float] = []
        while self._num_opened < len(self._left) and alive < self._max_alive:
            wanted = ready[need - 1] if need <= len(ready) else math.inf
            if wanted <= slots.free_at:
                lookahead -= self._rules.group_size
            if min(allowance, lookahead) <= 0 and wanted < math.inf:
                break
            # One-shot starts more only where rejected groups would leave the step without enough.
            may_start = int(min(max(allowance, 1), self._rules.group_size))
            lengths = self._left[self._num_opened].tolist()
            placed = slots.place(lengths[:may_start])
            placed += [math.inf] * (len(lengths) - may_start)
            allowance -= may_start
            if self._work.is_kept[self._num_opened]:
                insort(ready, max(map(sum, zip(placed, lengths, strict=True))))
                alive += 1
            starts += placed
            self._num_opened += 1
        return starts

    def _waits_until(self, groups: Ints, ends: Floats, version: int) -> float:
        """The engine step from which on none is left that later steps could not train in time:
        `deadlines.must_wait`, solved for time.
        """
        if not self._rules.finish_stale:
            return 0.0
        num_groups, first = self._rules.num_groups, version - self._rules.max_staleness
        oldest = self._oldest[groups]
        until = 0.0
        for limit in range(first, version):
            due = ends[oldest <= limit]
            num_ready = sum(entry[0] <= limit for entry in self._ready)
            surplus = min(num_groups - num_ready, len(due) - (limit - first) * num_groups)
            if surplus > 0:
                until = max(until, float(np.partition(due, surplus - 1)[surplus - 1]))
        return until

    def _hold(self, samples: Ints, starts: Floats, *, at: float) -> None:
        """Note what the samples in slots hold at an engine step."""
        left = self._left.ravel()[samples]
        had = self._work.lengths.ravel()[samples] - left
        is_running = (starts < at) & (starts + left >= at)
        held = (self._work.prompt_tokens + had + at - starts)[is_running].sum()
        self.done.context_tokens.append(float(held))

    def _compute(self, samples: Ints, starts: Floats, *, version: int, until: float) -> None:
        """Every sample as far as it gets in `until` engine steps; groups that complete leave."""
        rules, work, left = self._rules, self._work, self._left.ravel()
        had = work.lengths.ravel()[samples] - left[samples]
        gained = np.clip(until - starts, 0.0, left[samples])
        groups = samples // rules.group_size
        is_started = starts < until
        left[samples] -= gained
        self.done.generated += float(gained.sum())
        context = work.prompt_tokens + had
        prompts = len(np.unique(groups[is_started & ((had == 0) | (work.reprefill_frac > 0))]))
        self.done.seconds += work.cost.seconds(
            engine_steps=until,
            slot_steps=gained.sum() / rules.num_engines,
            context_token_steps=(gained * (context + gained / 2)).sum() / rules.num_engines,
            prefilled_tokens=(
                work.reprefill_frac * had[is_started].sum() + prompts * work.prompt_tokens
            )
            / rules.num_engines,
        )
        touched = groups[gained > 0]
        self._oldest[touched] = np.minimum(self._oldest[touched], version)
        self._settle(groups, gained, version)

    def _settle(self, groups: Ints, gained: Floats, version: int) -> None:
        """Groups of the queue that are complete become ready, or go."""
        found, first = np.unique(groups, return_index=True)
        now = np.add.reduceat(gained, first) if len(first) else gained
        is_ready = (self._left[found] <= 0).all(axis=1) & self._work.is_kept[found]
        for group, tokens in zip(found[is_ready].tolist(), now[is_ready].tolist(), strict=True):
            self._before[group] = self._totals[group] - tokens
            self._ready.append((int(self._oldest[group]), group, version))

    def _train(self, version: int) -> None:
        """The oldest ready groups."""
        self._ready.sort()
        taken = self._ready[: self._rules.num_groups]
        del self._ready[: self._rules.num_groups]
        for oldest, group, completed_in in taken:
            tokens = float(self._totals[group])
            self.done.tokens += tokens
            self.done.off_policy_tokens += (
                self._before[group] if completed_in == version else tokens
            )
            self.done.staleness += version - oldest
        self.done.groups += len(taken)


def _completed(groups: Ints, ends: Floats) -> tuple[Ints, Floats]:
    """Each group of the samples [Q], and when its last sample ends."""
    found, first = np.unique(groups, return_index=True)
    return found, np.maximum.reduceat(ends, first) if len(first) else ends
