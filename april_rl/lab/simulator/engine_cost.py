"""Seconds that an engine's work takes, and how to fit them to the ticks of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from april_rl.training.rollout.ticks import TickWork

Floats64 = NDArray[np.float64]

MIN_TICKS = 8  # twice as many equations as unknowns
TUKEY_CUTOFF = 4.685  # residuals of more standard deviations get no weight
MAD_TO_DEVIATION = 1.4826  # factor for a normal distribution
ROUNDS = 6  # rounds of reweighting; the weights no longer change after three or four
# Relative cutoff of the normal equations: it ignores work that varies by less than 1e-4.
_RCOND = 1e-8


class EngineWork(NamedTuple):
    """Work of an engine; the counts are fields of a Tick."""

    engine_steps: float = 0.0
    slot_steps: float = 0.0
    context_token_steps: float = 0.0
    prefilled_tokens: float = 0.0


class Cost(Protocol):
    """Seconds of engine work."""

    def seconds(self, work: EngineWork) -> float:
        """Return the seconds for this work; each term is at least 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledCost:
    """The cost of work of which only a part is simulated."""

    real: Cost
    tokens: float  # engine steps, and tokens of a sample, for each simulated one
    samples: float  # samples for each simulated one

    def seconds(self, work: EngineWork) -> float:
        """Return the seconds of the real work behind this simulated work."""
        real = EngineWork(
            engine_steps=self.tokens * work.engine_steps,
            slot_steps=self.tokens * self.samples * work.slot_steps,
            context_token_steps=self.tokens**2 * self.samples * work.context_token_steps,
            prefilled_tokens=self.tokens * self.samples * work.prefilled_tokens,
        )
        return self.real.seconds(real)


class EngineCost(NamedTuple):
    """Seconds of each part of EngineWork, in its order: an engine step, a request in it, a token
    that attention reads, a prefilled token.
    """

    step_s: float
    sample_s: float
    context_token_s: float
    prefill_token_s: float

    def seconds(self, work: EngineWork) -> float:
        """Return the seconds for this work."""
        return sum(cost_s * amount for cost_s, amount in zip(self, work, strict=True))


def fit_cost(ticks: Sequence[TickWork]) -> EngineCost:
    """Return the cost whose four terms, none negative, explain `elapsed_s` of the ticks best.

    Each tick counts relative to the seconds it took, and ticks that the machine held up count less
    or not at all: least squares reweighted by Tukey's biweight (Beaton and Tukey 1974). Raise
    ValueError when fewer than eight ticks did anything.
    """
    computed = [tick for tick in ticks if tick.engine_steps]
    if len(computed) < MIN_TICKS:
        raise ValueError(
            f"an engine's cost is fitted on at least {MIN_TICKS} ticks that computed something, "
            f"got {len(computed)}"
        )
    table = np.array(computed, dtype=np.float64)
    work, elapsed = table[:, :-1], table[:, -1]  # [n, 4], [n]
    scale = 1 / np.maximum(elapsed, np.median(elapsed) / 10 or 1.0)
    work, elapsed = work * scale[:, None], elapsed * scale
    weights = np.ones(len(work))
    for _ in range(ROUNDS):
        coefficients = _non_negative_fit(work, elapsed, weights)
        weights = _biweight(elapsed - work @ coefficients)
    return EngineCost(*coefficients.tolist())


def _non_negative_fit(work: Floats64, elapsed: Floats64, weights: Floats64) -> Floats64:
    """Return the exact weighted least-squares solution with non-negative coefficients [4] for work
    [n, 4].

    The minimum is the unconstrained minimum over some subset of the columns, so the best feasible
    subset gives it; if the solution with all columns is feasible, no other is better. Directions in
    which the work hardly varies get no weight: batches of one size cannot tell the cost of a step
    from that of its samples.
    """
    root = np.sqrt(weights)
    weighted, target = work * root[:, None], elapsed * root
    size = np.linalg.norm(weighted, axis=0)
    weighted = weighted / np.where(size > 0, size, 1.0)
    gram, moment = weighted.T @ weighted, weighted.T @ target
    best, best_loss = np.zeros(work.shape[1]), math.inf
    used = [c for c in range(work.shape[1]) if size[c] > 0]
    subsets = (combinations(used, number) for number in range(len(used), 0, -1))
    for columns in map(list, chain.from_iterable(subsets)):
        inner = gram[np.ix_(columns, columns)]
        found = np.linalg.lstsq(inner, moment[columns], rcond=_RCOND)[0]
        if (found < 0).any():
            continue
        loss = float(found @ inner @ found - 2 * moment[columns] @ found)
        if loss < best_loss:
            best, best_loss = np.zeros(work.shape[1]), loss
            best[columns] = found / size[columns]
        if columns == used:
            break
    return best


def _biweight(residuals: Floats64) -> Floats64:
    """Return weights in [0, 1] for relative residuals [n]; all are one where most points fit
    exactly.
    """
    deviation = MAD_TO_DEVIATION * float(np.median(np.abs(residuals)))
    if deviation < 1e-9:
        return (np.abs(residuals) < 1e-6).astype(np.float64)
    ratio = residuals / (TUKEY_CUTOFF * deviation)
    return np.where(np.abs(ratio) < 1, (1 - ratio**2) ** 2, 0.0)
