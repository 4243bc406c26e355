"""`environment`: the sum of the environment's rewards over the turns; 0.0 if it gave none."""

from __future__ import annotations

from april_rl.task.rewards.loading import Reward, RewardContext


def build(context: RewardContext) -> Reward:  # noqa: ARG001
    """Return the function; it takes no arguments."""

    def environment(
        prompts: list[str],  # noqa: ARG001
        responses: list[str],  # noqa: ARG001
        answers: list[str],  # noqa: ARG001
        *,
        environment_rewards: list[float],
    ) -> list[float]:
        return environment_rewards

    return Reward(call=environment)
