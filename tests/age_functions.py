"""Functions for learner.age_weight, valid and invalid ones."""

not_a_function = 3


def half_each_step(age):
    """Return 0.5 to the power of the age."""
    return 0.5**age


def fails_at_age_2(age):
    """Raise only at age 2, after the first calls succeeded."""
    return 1 / (2 - age)


def negative_weight(age):
    """Return a negative weight for stale tokens."""
    return 1 - 2 * age


def weight_as_text(age):  # noqa: ARG001
    """Return text instead of a number."""
    return "1.0"


def age_itself(age):
    """Return a weight that grows with age and is 0 for fresh tokens."""
    return age
