"""How many samples a step keeps in flight."""

from __future__ import annotations

from typing import Protocol

from april_rl.rollout.stats import StepStats
from april_rl.types import ScoredGroup


class OverSampling(Protocol):
    """The over-sampling factor α of the next step."""

    @property
    def factor(self) -> float:
        """Samples in flight ÷ samples a step needs, at least 1."""

    def observe(self, stats: StepStats, groups: tuple[ScoredGroup, ...]) -> str | None:
        """Learn from a step; why the factor changes, in one line, when it does."""


class FixedFactor:
    """The same α for the whole run."""

    def __init__(self, factor: float) -> None:
        """At least 1."""
        self.factor = factor

    def observe(self, stats: StepStats, groups: tuple[ScoredGroup, ...]) -> None:
        """Nothing is learned."""
