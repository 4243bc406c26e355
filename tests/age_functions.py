"""Functions for learner.age_weight, valid and invalid ones."""

not_a_function = 3


def half_each_step(age):
    return 0.5**age


def fails_at_age_2(age):
    """Raise only at age 2, after the first calls succeeded."""
    return 1 / (2 - age)


def negative_weight(age):
    return 1 - 2 * age


def weight_as_text(age):  # noqa: ARG001
    return "1.0"


def age_itself(age):
    return age
