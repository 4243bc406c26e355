"""`math_verify`: 1.0 when math-verify takes the answer of the response as right, else 0.0.

What math-verify cannot read is wrong. A response on which it takes longer than
`reward.soft_timeout_s` gets 0.0 and counts in `reward/soft_timeouts`.
"""

from __future__ import annotations

from april_rl.rewards.jobs import Responses, Verdict
from april_rl.rewards.loading import BuiltScorer, Context
from april_rl.rewards.math_reward import SoftTimeoutError, score_math

START_S = 30.0  # limit of the first call


def build(context: Context) -> BuiltScorer:
    """Return the function; it takes no arguments."""
    # math-verify loads libraries at its first call; that must not count against a response.
    score_math(r"\boxed{1}", "1", soft_timeout_s=START_S)

    def verdict(response: str, answer: str) -> Verdict:
        try:
            value = score_math(
                response, answer, how=context.extract, soft_timeout_s=context.soft_timeout_s
            )
        except SoftTimeoutError:
            return Verdict(outcome="soft_timeout", value=0.0)
        return Verdict(outcome="scored", value=value)

    def score(responses: Responses) -> list[Verdict]:
        return [verdict(text, responses.prompt.answer) for text in responses.texts]

    return BuiltScorer(scorer=score)
