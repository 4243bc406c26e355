"""Runs with `rollout.over_sampling_factor=auto` on simulated engines, and the throughput of every
fixed factor in the same setups.
"""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from functools import cache

import numpy as np

from april_rl.lab.simulator.engine_cost import EngineCost
from april_rl.lab.simulator.length_distributions import Lognormal
from april_rl.lab.simulator.outcome import Outcome
from april_rl.lab.simulator.prediction import Mode, Prediction
from april_rl.lab.simulator.simulation import Scenario, simulate
from april_rl.lab.tuning.auto_factor import AutoFactor, Budgets
from april_rl.lab.tuning.comparison import Comparison
from april_rl.training.rollout.collector import Collection
from april_rl.types import SampleId

TAIL = Lognormal(median_tokens=100, sigma=1.0, correlation=0.3)
NARROW = Lognormal(median_tokens=100, sigma=0.3)
# One step costs as much as a hundred samples, or as much as one.
CHEAP_SAMPLES = EngineCost(step_s=2e-3, sample_s=2e-5, context_token_s=1e-8, prefill_token_s=3e-5)
SATURATED = replace(CHEAP_SAMPLES, step_s=2e-4, sample_s=2e-4)
UNLIMITED = Budgets(max_off_policy_frac=1.0, kv_cache_tokens=10**9)


GRID = [1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4]  # every α that auto may choose


def speeds(*relative: float) -> dict[float, float]:
    """Return the throughputs of the factors of GRID, from the smallest factor up."""
    return dict(zip(GRID, relative, strict=False))


def one_length(_: SampleId) -> int:
    return 100


@dataclass(frozen=True, kw_only=True)
class NoisyCost(EngineCost):
    """The cost of ticks with noise of up to a fifth."""

    rng: np.random.Generator

    def seconds(self, **work: float) -> float:
        return super().seconds(**work) * (1 + 0.2 * self.rng.uniform(-1, 1))


def scenario(**changes: object) -> Scenario:
    base = Scenario(
        cost=CHEAP_SAMPLES,
        length_of=TAIL,
        num_groups=8,
        group_size=4,
        max_response_tokens=1024,
        prompt_tokens=20,
    )
    return replace(base, **changes)


@dataclass(frozen=True, kw_only=True)
class SetUp:
    """A scenario, the budgets of `auto` in it, and the throughput of fixed factors."""

    scenario: Scenario
    # Trained samples per second by α, relative to the best one: the mean of four runs of 500 steps.
    speeds: dict[float, float]
    refill: bool = True
    budgets: Budgets = UNLIMITED
    largest: float = 4.0  # largest α within the budgets


_NARROW = scenario(length_of=NARROW, num_groups=16, group_size=2, keeps_parked=True)
_NARROW_SPEEDS = speeds(0.52, 0.61, 0.68, 0.74, 0.78, 0.88, 0.94, 0.98, 1.0)
SET_UPS = {
    "reprefill": SetUp(
        scenario=scenario(), speeds=speeds(0.86, 0.91, 0.94, 0.96, 0.96, 0.99, 1.0, 1.0, 1.0)
    ),
    "keep": SetUp(
        scenario=scenario(keeps_parked=True),
        speeds=speeds(0.81, 0.86, 0.89, 0.92, 0.95, 0.98, 0.99, 1.0, 1.0),
    ),
    "one-shot": SetUp(
        scenario=scenario(),
        refill=False,
        speeds=speeds(0.32, 0.72, 0.84, 0.88, 0.91, 0.95, 0.95, 0.98, 1.0),
    ),
    "saturated": SetUp(
        scenario=scenario(length_of=one_length, cost=SATURATED),
        speeds=speeds(1.0, 0.97, 0.99, 0.96, 0.95, 0.90, 0.92, 0.87, 0.84),
    ),
    "off-policy": SetUp(
        scenario=_NARROW,
        budgets=replace(UNLIMITED, max_off_policy_frac=0.88),
        speeds=_NARROW_SPEEDS,
        largest=1.75,
    ),
    "kv": SetUp(
        scenario=_NARROW,
        budgets=replace(UNLIMITED, kv_cache_tokens=6000),
        speeds=_NARROW_SPEEDS,
        largest=1.75,
    ),
    "masked": SetUp(
        scenario=scenario(max_staleness=2, finish_stale=False, keeps_parked=True),
        speeds=speeds(0.84, 0.94, 0.98, 1.0, 1.0, 1.0, 1.0),
        largest=3.0,
    ),
}


def noisy(of: Scenario, *, seed: int) -> Scenario:
    length_of = (
        replace(of.length_of, seed=seed) if isinstance(of.length_of, Lognormal) else of.length_of
    )
    rng = np.random.default_rng(seed)
    return replace(of, length_of=length_of, seed=seed, cost=NoisyCost(**asdict(of.cost), rng=rng))


def at_once(comparison: Comparison) -> Future[list[Prediction]]:
    """Return the predictions, computed in this process without waiting."""
    predictions: Future[list[Prediction]] = Future()
    predictions.set_result(comparison.predictions())
    return predictions


def prediction(mode: Mode, *, speed: float = 1.0, kv_tokens: int = 1) -> Prediction:
    """Return a prediction with these figures; the speed is in tokens per second."""
    outcome = Outcome(
        num_steps=1,
        rollout_s=1.0,
        generated_tokens=speed,
        peak_kv_tokens=kv_tokens,
        tokens_by_age=Counter({0: 50, 1: 50}),
    )
    return Prediction(mode=mode, outcome=outcome, gain=1.0, step_gain=1.0)


def tuner(
    of: Scenario,
    budgets: Budgets = UNLIMITED,
    *,
    refill: bool = True,
    submit: Callable[[Comparison], Future[list[Prediction]]] = at_once,
) -> AutoFactor:
    """Return a tuner that gets the settings of the scenario, but not its lengths and cost."""
    settings = replace(
        of,
        length_of=one_length,
        cost=EngineCost(step_s=1.0, sample_s=0.0, context_token_s=0.0, prefill_token_s=0.0),
    )
    return AutoFactor(settings, budgets, refill=refill, submit=submit)


@dataclass
class Tuned:
    """A run with auto: its choices, notes and throughput."""

    outcome: Outcome = field(default_factory=Outcome)
    factors: list[float] = field(default_factory=list)  # [steps that generated]
    notes: list[str] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)  # staleness of the trained groups

    @property
    def changed_at(self) -> list[int]:
        return [i for i in range(1, len(self.factors)) if self.factors[i] != self.factors[i - 1]]

    @property
    def num_turns(self) -> int:
        """Return how often α changed its direction after the first try of a larger batch."""
        signs = np.sign(np.diff([self.factors[i] for i in [0, *self.changed_at]]))[1:]
        return int((np.diff(signs) != 0).sum())


def tune(
    of: Scenario, auto: AutoFactor, *, refill: bool = True, num_steps: int, warmup_steps: int = 0
) -> Tuned:
    """Run the scenario; the first steps do not count in the throughput."""
    run = Tuned()

    def on_step(version: int, collection: Collection) -> None:
        run.notes += collection.notes
        if collection.record.ticks:
            run.factors.append(collection.record.num_slots / (of.num_groups * of.group_size))
        oldest = [scored.group.oldest_version for scored in collection.groups]
        run.staleness += [version - old for old in oldest if old is not None]

    run.outcome = simulate(
        of,
        over_sampling=auto,
        refill=refill,
        num_steps=num_steps - warmup_steps,
        warmup_steps=warmup_steps,
        on_step=on_step,
    )
    return run


@cache
def tuned_run(name: str, *, seed: int = 0, num_steps: int = 60) -> Tuned:
    set_up = SET_UPS[name]
    of = noisy(set_up.scenario, seed=seed)
    auto = tuner(of, set_up.budgets, refill=set_up.refill)
    return tune(of, auto, refill=set_up.refill, num_steps=num_steps, warmup_steps=20)


def of_the_best(name: str, factor: float) -> float:
    """Return the throughput of a fixed factor divided by that of the best one within
    the budgets.
    """
    set_up = SET_UPS[name]
    allowed = {each: speed for each, speed in set_up.speeds.items() if each <= set_up.largest}
    return set_up.speeds[factor] / max(allowed.values())
