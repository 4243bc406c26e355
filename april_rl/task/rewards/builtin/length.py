"""`length`: a value that changes from one number to another as the response grows.

It is `start_value` up to `start_tokens` and `end_value` from `end_tokens` on. In between it is
linear or follows half a cosine: v = end + (start - end) * (1 + cos(pi * x)) / 2 with x from 0 to 1,
the curve of Yeo et al. 2025 (arXiv 2502.03373). Use it with a weight in addition to the reward for
the answer. It never fails; invalid arguments are refused at the start.
"""

from __future__ import annotations

import math

from april_rl.task.rewards.loading import Reward, RewardContext

SHAPES = ("linear", "cosine")


def build(
    context: RewardContext,  # noqa: ARG001
    *,
    start_tokens: int,
    end_tokens: int,
    start_value: float = 0.0,
    end_value: float = -1.0,
    shape: str = "linear",
) -> Reward:
    """Return the function. Raises ValueError for an unknown shape or an empty range."""
    if shape not in SHAPES:
        raise ValueError(f"args.shape={shape} must be one of {', '.join(SHAPES)}")
    if not 0 <= start_tokens < end_tokens:
        raise ValueError(
            f"args.end_tokens={end_tokens} must be above args.start_tokens={start_tokens}, which "
            "must be at least 0"
        )

    def length(
        prompts: list[str],  # noqa: ARG001
        responses: list[str],  # noqa: ARG001
        answers: list[str],  # noqa: ARG001
        *,
        num_tokens: list[int],
    ) -> list[float]:
        return [value_at(tokens) for tokens in num_tokens]

    def value_at(tokens: int) -> float:
        way = min(1.0, max(0.0, (tokens - start_tokens) / (end_tokens - start_tokens)))
        rest = 1.0 - way if shape == "linear" else (1.0 + math.cos(math.pi * way)) / 2
        return end_value + (start_value - end_value) * rest

    return Reward(call=length)
