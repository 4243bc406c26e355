"""`exact`: 1.0 when the answer of the response equals the data set's answer as text, else 0.0.

The answer is read as `reward.extract` says. Before they are compared, `extraction.normalise`
removes everything that never changes the meaning: spaces, `$`, sizes of fractions and brackets,
thousands commas. A response that states several different answers is wrong. It never fails.
"""

from __future__ import annotations

from functools import partial

from april_rl.answers.extraction import gold_answer, normalise, stated_answers
from april_rl.task.rewards.loading import Reward, RewardContext, each_response


def build(context: RewardContext) -> Reward:
    """Return the function; it takes no arguments."""
    return each_response(partial(score_exact, how=context.extract))


def score_exact(response: str, answer: str, *, how: str) -> float:
    """Return 1.0 when every answer that the response states has the text of `answer`, else 0.0."""
    stated = {normalise(text) for text in stated_answers(response, how)}
    return float(stated == {normalise(gold_answer(answer))})
