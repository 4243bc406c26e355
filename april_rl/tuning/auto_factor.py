"""`rollout.over_sampling_factor=auto`: the α that finishes most samples per second, found while the
run goes on.

After a step it knows how long the responses of the groups opened last are, what the engines' work
costs (`evidence`), and so what each α would do (`forecast`). It goes to the smallest α whose
throughput is within 4 % of that of the best one the budgets allow: what a larger one adds is mostly
staleness, and steps that wait at the staleness cap.

It begins at 1, the easiest on every budget, and stays there while the first long responses are
under way. It never oscillates: forecasts are averaged, and one that is alone above its neighbours
does not count; α moves at most two places on its grid at a time, no sooner than three steps after
the last change, and only for a gain in throughput. That gain is 2 % at first, doubles with every
turn of direction up to 16 %, and is twice that after a long rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from april_rl.rollout.stats import StepStats
from april_rl.tuning.evidence import Evidence
from april_rl.tuning.forecast import Forecast, Rules, blend, forecast
from april_rl.types import ScoredGroup

_GRID = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0)
_MOST_PLACES = 2  # of the grid, at a time
_STEPS_BETWEEN = 3  # from one change to the next
_LONG_REST = 12  # steps without a change, after which it looks and moves less readily
_GAIN, _LARGEST_GAIN = 0.02, 0.16  # of samples per second, that a change has to promise
_INDIFFERENT = 0.96  # of the best throughput
_WEIGHT = 0.25  # of the latest forecast, at least
_CLEARLY_SMALLER = 0.8  # of α: then it counts that throughput is no worse
_MARGIN = 0.95  # the share of a budget that a larger α may use; where it is, it may use all

_KV_HEADROOM = 1.3  # a long run meets more than the steps that a forecast plays


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """What every choice has to hold."""

    max_off_policy_frac: float  # of the trained tokens
    max_staleness: int  # policy versions, here for the mean over groups
    kv_cache_tokens: int  # of all engines

    def broken_by(self, there: Forecast, *, margin: float) -> str | None:
        """Which budget, and how; None when `margin` of each is enough.

        The collector never holds more groups than are trained within the staleness cap, so that one
        needs no margin.
        """
        held = _KV_HEADROOM * there.context_tokens
        has_share = self.max_off_policy_frac < 1  # a share of all tokens is no budget
        if has_share and there.off_policy_frac > margin * self.max_off_policy_frac:
            return (
                f"at {there.factor:g} the off-policy share is {there.off_policy_frac:.2f}, "
                f"rollout.max_off_policy_frac={self.max_off_policy_frac:g}"
            )
        if held > margin * self.kv_cache_tokens:
            return (
                f"at {there.factor:g} there may be {held:.0f} tokens in flight, the KV cache "
                f"holds {self.kv_cache_tokens}"
            )
        if there.staleness > self.max_staleness:
            return (
                f"at {there.factor:g} the mean staleness is {there.staleness:.1f}, "
                f"rollout.max_staleness={self.max_staleness}"
            )
        return None


def largest_factor(max_staleness: int) -> float:
    """The largest α ever chosen: a sample stays about α steps, and above 4 little is gained."""
    return min(max_staleness + 1.0, _GRID[-1])


class AutoFactor:
    """The `OverSampling` that learns α; a function of what it observes alone."""

    def __init__(self, rules: Rules, budgets: Budgets, *, max_response_tokens: int) -> None:
        """`rules`: those of the collector that asks it."""
        self._rules, self._budgets = rules, budgets
        top = largest_factor(rules.max_staleness)
        self._grid = [factor for factor in _GRID if factor <= top]
        self._place = 0  # of α on the grid
        self._direction = self._turns = 0  # of the last change; how often that was another
        self._rest = 0  # steps with work since then
        self._looks = self._num_averaged = 0
        self._was_better_below = False  # at the last look
        self._was_cost_known = False
        self._margin = _MARGIN
        self._forecasts: list[Forecast] = []  # [grid]
        self._has_warned = False
        self._evidence = Evidence(rules, max_response_tokens=max_response_tokens)

    @property
    def factor(self) -> float:
        """α of the next step."""
        return self._grid[self._place]

    def observe(self, stats: StepStats, groups: tuple[ScoredGroup, ...]) -> str | None:
        """Learn from a step; in one line, why α changes when it does, or that a budget cannot be
        held.
        """
        self._evidence.observe(stats, num_groups=len(groups))
        if not any(tick.engine_steps for tick in stats.ticks):
            return None
        self._rest += 1
        is_due = self._rest % (_STEPS_BETWEEN if self._rest <= _LONG_REST else _LONG_REST) == 0
        if not is_due or not self._evidence.suffices:
            return None
        self._looks += 1
        is_cost_known = self._evidence.tells_loads_apart
        self._look(is_cost_known)
        allowed = self._allowed()
        broken = self._budgets.broken_by(self._forecasts[self._place], margin=1.0)
        if broken is not None:
            return self._retreat(allowed, broken)
        if is_cost_known:
            return self._follow(allowed)
        place = min(self._place + _MOST_PLACES, allowed[-1])
        limit = self._limit(allowed, place) if place == allowed[-1] else ""
        return self._move(place, f"to see what a larger batch costs the engines{limit}")

    def _look(self, is_cost_known: bool) -> None:
        """What each place of the grid would do, averaged over the looks at one kind of cost."""
        work = self._evidence.work(seed=self._looks)
        latest = [forecast(self._rules, work, factor=factor) for factor in self._grid]
        if is_cost_known != self._was_cost_known:
            self._was_cost_known, self._num_averaged, self._forecasts = is_cost_known, 0, []
        self._num_averaged += 1
        weight = max(_WEIGHT, 1 / self._num_averaged)
        self._forecasts = [
            blend(old, new, weight=weight)
            for old, new in zip(self._forecasts or latest, latest, strict=True)
        ]

    def _allowed(self) -> list[int]:
        """The places within the budgets, from the smallest α; those above α with a margin."""
        allowed: list[int] = []
        for place, there in enumerate(self._forecasts):
            margin = 1.0 if place <= self._place else self._margin
            if self._budgets.broken_by(there, margin=margin) is not None:
                break
            allowed.append(place)
        return allowed or [0]

    def _retreat(self, allowed: Sequence[int], broken: str) -> str | None:
        """Down to where the budgets hold, and less readily up again; but not below 1."""
        if self._place:
            self._margin *= _MARGIN
            return self._move(allowed[-1], broken)
        if self._has_warned:
            return None
        self._has_warned = True
        return f"rollout.over_sampling_factor=auto cannot hold a budget with any α: {broken}"

    def _follow(self, allowed: Sequence[int]) -> str | None:
        """Towards the best place, when that is worth a change."""
        speeds = without_outliers([there.samples_per_s for there in self._forecasts])
        best = max(speeds[place] for place in allowed)
        target = next(place for place in allowed if speeds[place] >= _INDIFFERENT * best)
        gain = speeds[target] / speeds[self._place] - 1
        if not self._is_worth_it(target, gain):
            return None
        reach = min(max(target, self._place - _MOST_PLACES), self._place + _MOST_PLACES)
        limit = self._limit(allowed, target)
        return self._move(
            reach, f"{100 * gain:+.0f} % samples/s expected at {self._grid[target]:g}{limit}"
        )

    def _is_worth_it(self, target: int, gain: float) -> bool:
        """Whether to leave for the place `target`, which promises `gain` in throughput."""
        direction = (target > self._place) - (target < self._place)
        is_turn = direction == -self._direction
        is_rested = self._rest > _LONG_REST
        needed = min(_GAIN * 2 ** (self._turns + is_turn), _LARGEST_GAIN) * (1 + is_rested)
        was_better, self._was_better_below = (
            self._was_better_below,
            self._grid[target] <= _CLEARLY_SMALLER * self.factor,
        )
        is_confirmed = self._was_better_below and was_better
        may_turn = not is_turn or self._turns == 0
        return gain >= needed or (is_confirmed and may_turn and not is_rested)

    def _limit(self, allowed: Sequence[int], target: int) -> str:
        """What keeps it from going further."""
        if target < allowed[-1]:
            return "; more would only be staler"
        if target + 1 < len(self._grid):
            broken = self._budgets.broken_by(self._forecasts[target + 1], margin=self._margin)
            return f"; limit: {broken}"
        return f"; limit: the largest α, {self._grid[-1]:g}"

    def _move(self, place: int, reason: str) -> str | None:
        if place == self._place:
            return None
        before = self.factor
        direction = 1 if place > self._place else -1
        self._turns += direction == -self._direction
        self._direction = direction
        self._place, self._rest, self._was_better_below = place, 0, False
        return f"rollout.over_sampling_factor {before:g} → {self.factor:g}: {reason}"


def without_outliers(speeds: Sequence[float]) -> list[float]:
    """The median of each speed and its two neighbours on the grid; at the top, the lower of the
    last two. Throughput changes smoothly with α; a forecast plays few steps and may be lucky.
    """
    if len(speeds) < 2:
        return list(speeds)
    inner = [median(speeds[place - 1 : place + 2]) for place in range(1, len(speeds) - 1)]
    return [speeds[0], *inner, min(speeds[-2:])]
