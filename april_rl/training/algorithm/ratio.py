"""The ratio of two probabilities from the difference of their logarithms."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0  # a ratio of 4.9e8; verl has the same bound


def clamp(log_ratio: Tensor) -> Tensor:
    """min(log_ratio, MAX_LOG_RATIO); beyond the bound it has no gradient.

    float32 overflows at 88.7. The gradient of such an exponential is 0 · inf, which is NaN, even
    for a clipped or masked token.
    """
    return log_ratio.clamp(max=MAX_LOG_RATIO)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), at most e^MAX_LOG_RATIO."""
    return clamp(log_ratio).exp()
