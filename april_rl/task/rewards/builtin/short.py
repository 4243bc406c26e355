"""The built-in rewards of a few lines; none of them ever fails."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial

from april_rl.answers.extraction import (
    THINK_END,
    THINK_START,
    extract_answer,
    gold_answer,
    normalise,
    stated_answers,
)
from april_rl.task.rewards.loading import Reward, RewardContext, each_response

SHAPES = ("linear", "cosine")
_MOST_DIGITS = 60
_LARGEST_EXPONENT = 60


def exact(context: RewardContext) -> Reward:
    """Return a reward of 1.0 where the answer of the response equals the data set's as text.

    The answer is read as `reward.extract` says. Before they are compared, `extraction.normalise`
    removes everything that never changes the meaning: spaces, `$`, sizes of fractions and brackets,
    thousands commas. A response that states several different answers is wrong.
    """
    return each_response(partial(score_exact, how=context.extract))


def score_exact(response: str, answer: str, *, how: str) -> float:
    """Return 1.0 when every answer that the response states has the text of `answer`, else 0.0."""
    stated = {normalise(text) for text in stated_answers(response, how)}
    return float(stated == {normalise(gold_answer(answer))})


def format(context: RewardContext, *, thinking: bool = True) -> Reward:
    """Return a reward of 1.0 for a response of the requested form, right or wrong.

    The form is one `<think>...</think>` and then an answer that `reward.extract` can read. Many
    chat templates write the `<think>` themselves, so it may be missing from the response;
    `</think>` may not. With `thinking: false` there must be an answer and no such tag.
    """
    return each_response(
        lambda response, _: float(has_form(response, how=context.extract, thinking=thinking))
    )


def has_form(response: str, *, how: str, thinking: bool) -> bool:
    """Return whether a response has its thinking in tags, or none, and then an answer."""
    if response.count(THINK_END) != thinking or response.count(THINK_START) > thinking:
        return False
    if THINK_START in response and not response.lstrip().startswith(THINK_START):
        return False
    return extract_answer(response, how) is not None


def last_number(context: RewardContext) -> Reward:
    """Return a reward of 1.0 where the last number of the response equals the answer's.

    With `reward.extract=auto` it is the last number in what a box or an `Answer:` line states, and
    of the whole response (after its thinking) when there is neither. With `boxed` and `answer_line`
    only what is stated there counts; with `last_number` the whole response does. A response that
    states several different numbers in that form is wrong. Numbers are compared by value: 1,000 is
    1000.0. An answer without a number makes every response wrong, and so do numbers with more than
    60 digits or powers of ten.
    """
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


def length(
    context: RewardContext,  # noqa: ARG001
    *,
    start_tokens: int,
    end_tokens: int,
    start_value: float = 0.0,
    end_value: float = -1.0,
    shape: str = "linear",
) -> Reward:
    """Return a value that changes from one number to another as the response grows, to be used with
    a weight in addition to the reward for the answer. Raise ValueError for an unknown shape or an
    empty range.

    It is `start_value` up to `start_tokens` and `end_value` from `end_tokens` on. In between it is
    linear or follows half a cosine: v = end + (start - end) * (1 + cos(pi * x)) / 2 with x from 0
    to 1, the curve of Yeo et al. 2025 (arXiv 2502.03373).
    """
    if shape not in SHAPES:
        raise ValueError(f"args.shape={shape} must be one of {', '.join(SHAPES)}")
    if not 0 <= start_tokens < end_tokens:
        raise ValueError(
            f"args.end_tokens={end_tokens} must be above args.start_tokens={start_tokens}, which "
            "must be at least 0"
        )

    def value_at(tokens: int) -> float:
        way = min(1.0, max(0.0, (tokens - start_tokens) / (end_tokens - start_tokens)))
        rest = 1.0 - way if shape == "linear" else (1.0 + math.cos(math.pi * way)) / 2
        return end_value + (start_value - end_value) * rest

    def by_length(
        _prompts: object, _responses: object, _answers: object, *, num_tokens: list[int]
    ) -> list[float]:
        return [value_at(tokens) for tokens in num_tokens]

    return Reward(call=by_length)


def environment(context: RewardContext) -> Reward:  # noqa: ARG001
    """Return the sum of the environment's rewards over the turns; 0.0 if it gave none."""

    def of_turns(
        _prompts: object,
        _responses: object,
        _answers: object,
        *,
        environment_rewards: list[float],
    ) -> list[float]:
        return environment_rewards

    return Reward(call=of_turns)
