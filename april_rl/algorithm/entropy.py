"""An entropy bonus as a term of the loss: the negative entropy of the next-token distribution.

Legend: [T] trained tokens, nats, at the sampling temperature.
"""

from __future__ import annotations

from torch import Tensor


def sampled_negative_entropy(logprobs: Tensor) -> Tensor:
    """½ (log π)² [T] of the sampled token: its gradient is unbiased for that of -H, its value is
    not -H.

    ∇(-H) = E[(log π + 1) ∇log π] over tokens of π, and E[∇log π] = 0. It is `kl.k2` against a
    uniform reference, but for a constant in the factor. Needs nothing beyond the log-probability;
    tokens of an older policy need their importance weight.
    """
    return logprobs.square() / 2
