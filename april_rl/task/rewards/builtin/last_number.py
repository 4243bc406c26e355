"""`last_number`: 1.0 when the last number of the response equals the answer's, else 0.0.

With `reward.extract=auto` it is the last number in what a box or an `Answer:` line states, and of
the whole response (after its thinking) when there is neither. With `boxed` and `answer_line` only
what is stated there counts; with `last_number` the whole response does. A response that states
several different numbers in that form is wrong. Numbers are compared by value: 1,000 is 1000.0. An
answer without a number makes every response wrong, and so do numbers with more than 60 digits or
powers of ten.
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial

from april_rl.answers.extraction import extract_answer, stated_answers
from april_rl.task.rewards.loading import Reward, RewardContext, each_response

_MOST_DIGITS = 60
_LARGEST_EXPONENT = 60


def build(context: RewardContext) -> Reward:
    """Return the function; it takes no arguments."""
    return each_response(partial(score_last_number, how=context.extract))


def score_last_number(response: str, answer: str, *, how: str) -> float:
    """Return 1.0 when the response states the last number of `answer` and no other, else 0.0."""
    expected = value_of(answer)
    if expected is None:
        return 0.0
    stated = stated_answers(response, how)
    if not stated and how == "auto":
        stated = stated_answers(response, "last_number")
    return float({value_of(text) for text in stated} == {expected})


def value_of(text: str) -> Fraction | None:
    """Return the last number in a text; None when there is none, or when it is out of bounds."""
    number = extract_answer(text, "last_number")
    if number is None or len(number) > _MOST_DIGITS:
        return None
    above, _, below = number.replace(",", "").lower().partition("/")
    exponent = above.partition("e")[2]
    if exponent and abs(int(exponent)) > _LARGEST_EXPONENT:
        return None
    divisor = int(below or 1)
    return Fraction(above) / divisor if divisor else None
