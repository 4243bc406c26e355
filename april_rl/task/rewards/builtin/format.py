"""`format`: 1.0 for a response of the requested form, else 0.0, right or wrong.

The form is one `<think>...</think>` and then an answer that `reward.extract` can read. Many chat
templates write the `<think>` themselves, so it may be missing from the response; `</think>` may
not. With `thinking: false` there must be an answer and no such tag. It never fails.
"""

from __future__ import annotations

from april_rl.answers.extraction import THINK_END, THINK_START, extract_answer
from april_rl.task.rewards.loading import Reward, RewardContext, each_response


def build(context: RewardContext, *, thinking: bool = True) -> Reward:
    """Return the function; `thinking` says whether the form includes thinking."""
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
