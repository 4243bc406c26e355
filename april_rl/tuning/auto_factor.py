"""`rollout.over_sampling_factor=auto`: find the α that pays while the run goes on.

    step ends:    observe ──▶ Evidence: lengths, cost ──▶ when a look is due: Comparison ──▶ process
    step begins:  begin_step ◀── Predictions for α and its neighbours, if they are there ◀──────┘

A look simulates the run as it is with α and with its neighbours on a grid. α goes up for a gain in
samples per second within the budgets, and down where it gains nothing: a larger α is staler. It
does not oscillate: gains are averaged over looks, looks get rarer while nothing changes, and every
change downwards doubles the gain that later ones upwards have to promise.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from april_rl.rollout.codec import Plain
from april_rl.rollout.stats import StepStats
from april_rl.simulator.simulation import Scenario
from april_rl.tuning.evidence import Evidence
from april_rl.tuning.prediction import Comparison, Prediction

_GRID = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0)
_STRIDE = 2  # places to a neighbour: a short simulation may miss what a single place gains
_GAIN = 0.02  # in samples per second, to go up
_UNDECIDED = (0.01, 1)  # mean gain before the first look, and how many looks that counts as
_WEIGHT = 0.1  # of the latest look in the mean gain: about nineteen looks count
_SHORTEST_REST, _LONGEST_REST = 3, 12  # steps with work between two looks
# A larger α has to hold budgets with some room; and a run's peak is above a short simulation's.
_ROOM, _PEAK = 0.985, 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """What every choice has to hold beside the staleness cap, which the collector holds itself."""

    max_off_policy_frac: float  # of the trained tokens; 1: no budget
    kv_cache_tokens: int  # of all engines

    def broken_by(self, found: Prediction, *, room: float = 1.0) -> str:
        """Return which budget is broken and how; nothing if `room` of each is enough."""
        share, held = found.off_policy_frac, _PEAK * found.kv_tokens
        if self.max_off_policy_frac < 1 and share > room * self.max_off_policy_frac:
            return (
                f"at {found.factor:g} the off-policy share is {share:.2f}, "
                f"rollout.max_off_policy_frac={self.max_off_policy_frac:g}"
            )
        if held > room * self.kv_cache_tokens:
            return (
                f"at {found.factor:g} up to {held:.0f} tokens are in flight, the KV cache holds "
                f"{self.kv_cache_tokens}"
            )
        return ""


def largest_factor(max_staleness: int) -> float:
    """Return the largest α ever chosen: a sample stays about α steps; above 4 little is gained."""
    return min(max_staleness + 1.0, _GRID[-1])


class AutoFactor:
    """The `OverSampling` that learns α, from what it observes and from when predictions come."""

    def __init__(
        self,
        settings: Scenario,
        budgets: Budgets,
        *,
        refill: bool,
        submit: Callable[[Comparison], Future[list[Prediction]]],
    ) -> None:
        """Begin at 1, the easiest on every budget; `settings` are those of the collector."""
        self._budgets, self._submit = budgets, submit
        self._evidence = Evidence(settings, refill=refill)
        self.factor = _GRID[0]  # α of the step
        # The largest α that is not known to break a budget.
        self._largest = largest_factor(settings.max_staleness)
        self._gains: dict[tuple[float, float], tuple[float, int]] = {}  # of two α: mean, looks
        self._needed_gain = _GAIN
        self._rest, self._steps = _SHORTEST_REST, 0  # between looks, since the last one
        self._num_looks = 0
        self._look: Future[list[Prediction]] | None = None  # under way
        self._looks_broken = 0  # in a row that found a budget broken
        self._has_failed = self._has_warned = False

    def observe(self, stats: StepStats, *, num_groups: int) -> None:
        """Learn from a step, and ask for predictions when a look is due."""
        self._evidence.observe(stats, num_groups=num_groups)
        self._steps += stats.engine_steps > 0
        is_due = self._steps >= self._rest and self._look is None and not self._has_failed
        if not (is_due and self._evidence.suffices):
            return
        self._steps, self._num_looks = 0, self._num_looks + 1
        factors = {self._neighbour(-_STRIDE), self.factor, self._neighbour(_STRIDE)}
        self._look = self._submit(self._evidence.comparison(sorted(factors), seed=self._num_looks))

    def begin_step(self) -> str | None:
        """Change α if a look that has ended says so; returns why, in one line."""
        if self._look is None or not self._look.done():
            return None
        look, self._look = self._look, None
        error = look.exception()
        if error is None:
            return self._follow({found.factor: found for found in look.result()})
        self._has_failed = True
        return (
            f"rollout.over_sampling_factor=auto stays at {self.factor:g}: its simulation failed "
            f"({type(error).__name__}: {error})"
        )

    def _neighbour(self, places: int) -> float:
        """Return the α so many places away, or the last one on the way there."""
        allowed = [factor for factor in _GRID if factor <= self._largest]
        place = allowed.index(self.factor) + places
        return allowed[min(max(place, 0), len(allowed) - 1)]

    def _follow(self, found: dict[float, Prediction]) -> str | None:
        """Go where the predictions for α and its neighbours say."""
        here, below, above = self.factor, min(found), max(found)
        broken = self._budgets.broken_by(found[here])
        self._looks_broken = self._looks_broken + 1 if broken else 0
        if broken and here == 1:
            is_news, self._has_warned = not self._has_warned, True
            note = f"rollout.over_sampling_factor=auto cannot hold a budget with any α: {broken}"
            return note if is_news else self._move(here, "")
        if self._looks_broken == 2:  # one look may err; this α is left for good
            self._largest, self._looks_broken = self._neighbour(-1), 0
            return self._move(self._largest, broken)
        if broken:
            return None
        limit = self._budgets.broken_by(found[above], room=_ROOM) if above > here else ""
        between = max((factor for factor in _GRID if factor < above), default=here)
        if limit and between > here:  # the next look is at that one
            self._largest = between
            return f"rollout.over_sampling_factor stays below {above:g}: {limit}"
        if limit:
            above = here
        if not self._evidence.is_cost_known:
            return self._move(above, "to see what a larger batch costs the engines")
        if above > here:
            gain = self._mean_gain(found[here], found[above])
            if gain >= self._needed_gain:
                return self._move(above, f"{100 * gain:+.0f} % samples/s expected")
        if below < here and self._mean_gain(found[below], found[here]) < 0:
            self._needed_gain *= 2
            return self._move(below, "as many samples/s, and fresher ones")
        return self._move(here, "")

    def _mean_gain(self, low: Prediction, high: Prediction) -> float:
        """Return the mean over looks of what the larger α adds to the throughput."""
        mean, count = self._gains.get((low.factor, high.factor), _UNDECIDED)
        latest = high.tokens_per_s / low.tokens_per_s - 1
        mean += max(1 / (count + 1), _WEIGHT) * (latest - mean)
        self._gains[low.factor, high.factor] = mean, count + 1
        return mean

    def _move(self, factor: float, reason: str) -> str | None:
        """Go to `factor`; the next look comes soon, or later than the last one if α stays."""
        before, self.factor = self.factor, factor
        if factor == before:
            self._rest = min(2 * self._rest, _LONGEST_REST)
            return None
        self._rest = _SHORTEST_REST
        return f"rollout.over_sampling_factor {before:g} → {factor:g}: {reason}"

    def save(self) -> Plain:
        """Return what was learned as plain data; a look under way is left out."""
        return {
            "factor": self.factor,
            "largest": self._largest,
            "gains": [[*factors, *gain] for factors, gain in self._gains.items()],
            "needed_gain": self._needed_gain,
            "rest": self._rest,
            "steps": self._steps,
            "num_looks": self._num_looks,
            "evidence": self._evidence.save(),
        }

    def restore(self, state: Plain) -> None:
        """Go on with what `save` returned, or begin anew if the saved run had a fixed factor."""
        if not state:
            return
        self._largest = min(state["largest"], self._largest)
        self.factor = min(state["factor"], self._largest)
        self._gains = {(low, high): (mean, n) for low, high, mean, n in state["gains"]}
        self._needed_gain, self._rest = state["needed_gain"], state["rest"]
        self._steps, self._num_looks = state["steps"], state["num_looks"]
        self._evidence.restore(state["evidence"])
