"""`math_verify`: 1.0 when math-verify takes the answer of the response as right, else 0.0.

What math-verify cannot read is wrong. A response on which it takes longer than
a third of `reward.hard_timeout_s` gets 0.0 and counts in `reward/soft_timeouts`.
"""

from __future__ import annotations

from april_rl.rewards.loading import Context, Reward, SoftTimeout
from april_rl.rewards.math_reward import SoftTimeoutError, score_math

START_S = 30.0  # time limit of the first call


def build(context: Context) -> Reward:
    """Return the function; it takes no arguments."""
    # math-verify loads libraries at its first call; that must not count against a response.
    score_math(r"\boxed{1}", "1", soft_timeout_s=START_S)

    def value(response: str, answer: str) -> float:
        try:
            return score_math(
                response, answer, how=context.extract, soft_timeout_s=context.soft_timeout_s
            )
        except SoftTimeoutError:
            return SoftTimeout(0.0)

    def math_verify(
        prompts: list[str],  # noqa: ARG001
        responses: list[str],
        answers: list[str],
    ) -> list[float]:
        return list(map(value, responses, answers))

    return Reward(call=math_verify)
