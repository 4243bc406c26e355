"""The number of samples that a step keeps in flight."""

from __future__ import annotations

import math
from typing import Protocol

from april_rl.training.rollout.codec import Plain
from april_rl.training.rollout.record import StepRecord

LARGEST_FACTOR = 4.0  # largest α that `auto` considers: above it little is gained


def largest_factor(max_staleness: int) -> float:
    """Return the largest α that `auto` considers: tokens reach an age of about α."""
    return min(max_staleness + 1.0, LARGEST_FACTOR)


def waitless_staleness(factor: float, *, longest: float, mean: float) -> int:
    """Return the smallest `max_staleness` at which no step waits for its oldest groups.

    A step trains N·G samples of `mean` tokens, and full slots generate α·N·G tokens per engine
    step. So a step lasts mean ÷ α engine steps, and a response of `longest` tokens takes α ·
    longest ÷ mean steps.
    """
    return math.ceil(round(factor * longest / mean, 6))


class OverSampling(Protocol):
    """The over-sampling factor α, step by step."""

    @property
    def factor(self) -> float:
        """Samples in flight ÷ samples a step needs, at least 1."""

    def begin_step(self) -> str | None:
        """Choose the factor of the step that begins; return why it changed, in one line."""

    def observe(self, record: StepRecord) -> None:
        """Learn from a step; returns at once."""

    def save(self) -> Plain:
        """Return what was learned as plain data, for JSON."""

    def restore(self, state: Plain) -> None:
        """Continue with what was learned; `state` may come from another kind of OverSampling."""


class FixedFactor:
    """The same α for the whole run."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def begin_step(self) -> None:
        """Change nothing."""

    def observe(self, record: StepRecord) -> None:
        """Learn nothing."""

    def save(self) -> Plain:
        """Return nothing: the factor is a setting."""
        return {}

    def restore(self, state: Plain) -> None:
        """Keep the factor of the settings."""
