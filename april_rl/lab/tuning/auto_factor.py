"""`rollout.over_sampling_factor=auto`: find the best α during the run.

    step ends:    observe ──▶ Evidence: lengths, cost ──▶ when one is due: Comparison ───▶ process
    step begins:  begin_step ◀── Predictions for α and its neighbours, if they are ready ◀────┘

A comparison simulates the current run with α and with its neighbours on a grid, two grid points
away. α is raised when that increases the tokens per second within the budgets, and lowered when it
gains nothing, because a larger α makes tokens staler. To avoid oscillation, gains are averaged over
comparisons, comparisons get rarer while α stays, and every decrease doubles the gain needed for an
increase.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from april_rl.lab.simulator.prediction import Prediction
from april_rl.lab.simulator.simulation import Scenario
from april_rl.lab.tuning.comparison import Comparison
from april_rl.lab.tuning.evidence import Evidence
from april_rl.training.rollout.codec import Plain
from april_rl.training.rollout.over_sampling import LARGEST_FACTOR, largest_factor
from april_rl.training.rollout.record import StepRecord

_GRID = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, LARGEST_FACTOR)
_STRIDE = 2  # grid points to a neighbour; a short simulation may miss the gain of a single one
_GAIN = 0.02  # relative gain in generated tokens per second needed to raise α
# Mean gain before the first comparison, and how many comparisons it counts as.
_UNDECIDED = (0.01, 1)
_WEIGHT = (
    0.1  # weight of the latest comparison in the running mean of the gain, which remembers about 19
)
_SHORTEST_REST, _LONGEST_REST = 3, 12  # steps that generate, between comparisons
# A larger α must stay within _ROOM of each budget. _PEAK is the ratio of a run's peak to that of a
# short simulation.
_ROOM, _PEAK = 0.985, 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Limits on the choice of α, in addition to the staleness cap that the collector enforces."""

    max_off_policy_frac: float  # share of the trained tokens; 1: no limit
    kv_cache_tokens: float  # tokens that fit one engine

    def describe_excess(self, found: Prediction, *, room: float = 1.0) -> str:
        """Return a message for the budget that `found` exceeds, or an empty string.

        Only the fraction `room` of each budget may be used.
        """
        factor, outcome = found.mode.factor, found.outcome
        share, held = outcome.off_policy_token_frac, _PEAK * outcome.peak_kv_tokens
        if self.max_off_policy_frac < 1 and share > room * self.max_off_policy_frac:
            return (
                f"at {factor:g} the off-policy share is {share:.2f}, "
                f"rollout.max_off_policy_frac={self.max_off_policy_frac:g}"
            )
        if held > room * self.kv_cache_tokens:
            return (
                f"at {factor:g} an engine holds up to {held:.0f} tokens, its KV cache has room for "
                f"{self.kv_cache_tokens:.0f}"
            )
        return ""


class AutoFactor:
    """An `OverSampling` that chooses α from what it observes, as predictions become ready."""

    def __init__(
        self,
        settings: Scenario,
        budgets: Budgets,
        *,
        refill: bool,
        submit: Callable[[Comparison], Future[list[Prediction]]],
    ) -> None:
        """Start with α = 1, which strains every budget least; `settings` describe the run."""
        self._budgets, self._submit = budgets, submit
        self._evidence = Evidence(settings, refill=refill)
        self.factor = _GRID[0]  # α of the current step
        # The largest α that is not known to break a budget.
        self._largest = largest_factor(settings.max_staleness)
        # Mean gain and number of comparisons, by pair of α.
        self._gains: dict[tuple[float, float], tuple[float, int]] = {}
        self._needed_gain = _GAIN
        # Steps between comparisons, and steps since the last one.
        self._rest, self._steps = _SHORTEST_REST, 0
        self._num_comparisons = 0
        self._pending: Future[list[Prediction]] | None = None  # being simulated
        self._num_broken = 0  # consecutive comparisons that found a budget broken
        self._has_failed = self._has_warned = False

    def observe(self, record: StepRecord) -> None:
        """Record a step, and submit a comparison when one is due."""
        self._evidence.observe(record)
        self._steps += any(tick.engine_steps for _, tick in record.ticks)
        is_due = self._steps >= self._rest and self._pending is None and not self._has_failed
        if not (is_due and self._evidence.suffices):
            return
        self._steps, self._num_comparisons = 0, self._num_comparisons + 1
        factors = {self._neighbour(-_STRIDE), self.factor, self._neighbour(_STRIDE)}
        self._pending = self._submit(
            self._evidence.comparison(sorted(factors), seed=self._num_comparisons)
        )

    def begin_step(self) -> str | None:
        """Change α if a finished comparison calls for it; return a note for the user, or None."""
        if self._pending is None or not self._pending.done():
            return None
        comparison, self._pending = self._pending, None
        error = comparison.exception()
        if error is None:
            return self._follow({found.mode.factor: found for found in comparison.result()})
        self._has_failed = True
        return (
            f"rollout.over_sampling_factor=auto stays at {self.factor:g}: its simulation failed "
            f"({type(error).__name__}: {error})"
        )

    def _neighbour(self, places: int) -> float:
        """Return the allowed α this many grid points away, or the outermost one on that side."""
        allowed = [factor for factor in _GRID if factor <= self._largest]
        place = allowed.index(self.factor) + places
        return allowed[min(max(place, 0), len(allowed) - 1)]

    def _follow(self, found: dict[float, Prediction]) -> str | None:
        """Choose α by the predictions for it and its neighbours; return a note or None."""
        here, below, above = self.factor, min(found), max(found)
        broken = self._budgets.describe_excess(found[here])
        self._num_broken = self._num_broken + 1 if broken else 0
        if broken and here == 1:
            is_news, self._has_warned = not self._has_warned, True
            note = f"rollout.over_sampling_factor=auto cannot hold a budget with any α: {broken}"
            return note if is_news else self._move(here, "")
        if self._num_broken == 2:  # one comparison may be wrong; after two, never use this α again
            self._largest, self._num_broken = self._neighbour(-1), 0
            return self._move(self._largest, broken)
        if broken:
            return None
        limit = self._budgets.describe_excess(found[above], room=_ROOM) if above > here else ""
        between = max((factor for factor in _GRID if factor < above), default=here)
        if limit and between > here:  # the next comparison includes `between`
            self._largest = between
            return f"rollout.over_sampling_factor stays below {above:g}: {limit}"
        if limit:
            above = here
        if not self._evidence.is_cost_known:
            return self._move(above, "to see what a larger batch costs the engines")
        if above > here:
            gain = self._mean_gain(found[here], found[above])
            if gain >= self._needed_gain:
                return self._move(above, f"{100 * gain:+.0f} % tokens/s expected")
        if below < here and self._mean_gain(found[below], found[here]) < 0:
            self._needed_gain *= 2
            return self._move(below, "as many tokens/s, and fresher ones")
        return self._move(here, "")

    def _mean_gain(self, low: Prediction, high: Prediction) -> float:
        """Return the relative gain of the larger α in throughput, averaged over comparisons."""
        mean, count = self._gains.get((low.mode.factor, high.mode.factor), _UNDECIDED)
        latest = high.outcome.generated_tokens_per_s / low.outcome.generated_tokens_per_s - 1
        mean += max(1 / (count + 1), _WEIGHT) * (latest - mean)
        self._gains[low.mode.factor, high.mode.factor] = mean, count + 1
        return mean

    def _move(self, factor: float, reason: str) -> str | None:
        """Set α to `factor`; the next comparison comes sooner if α changed, otherwise later."""
        before, self.factor = self.factor, factor
        if factor == before:
            self._rest = min(2 * self._rest, _LONGEST_REST)
            return None
        self._rest = _SHORTEST_REST
        return f"rollout.over_sampling_factor {before:g} → {factor:g}: {reason}"

    def save(self) -> Plain:
        """Return what was learned as plain data, without a comparison that is still being
        simulated.
        """
        return {
            "factor": self.factor,
            "largest": self._largest,
            "gains": [[*factors, *gain] for factors, gain in self._gains.items()],
            "needed_gain": self._needed_gain,
            "rest": self._rest,
            "steps": self._steps,
            "num_comparisons": self._num_comparisons,
            "evidence": self._evidence.save(),
        }

    def restore(self, state: Plain) -> None:
        """Continue from what `save` returned; begin at 1 if the saved run had a fixed factor."""
        if not state:
            return
        self._largest = min(state["largest"], self._largest)
        self.factor = min(state["factor"], self._largest)
        self._gains = {(low, high): (mean, n) for low, high, mean, n in state["gains"]}
        self._needed_gain, self._rest = state["needed_gain"], state["rest"]
        self._steps, self._num_comparisons = state["steps"], state["num_comparisons"]
        self._evidence.restore(state["evidence"])
