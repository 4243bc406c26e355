"""Functions for learner.age_weight, good ones and bad ones."""

from __future__ import annotations

not_a_function = 3


def half_each_step(age):
    """One half to the power of the age."""
    return 0.5**age


def fails_at_age_2(age):
    """A weight that its first call does not betray."""
    return 1 / (2 - age)


def negative_weight(age):
    """A weight below zero for stale tokens."""
    return 1 - 2 * age


def weight_as_text(age):  # noqa: ARG001
    """A weight that is no number."""
    return "1.0"


def age_itself(age):
    """A weight the wrong way round."""
    return age
