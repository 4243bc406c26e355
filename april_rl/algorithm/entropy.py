"""An entropy bonus as a term of the loss: the negative entropy of the next-token distribution.

Legend: [T] trained tokens, nats, at the sampling temperature.
"""

from __future__ import annotations

from torch import Tensor


def sampled_negative_entropy(logprobs: Tensor) -> Tensor:
    """½ (log π)² [T] of the sampled token: its gradient is an unbiased estimate of the gradient of
    -H, its value does not estimate -H.

    ∇(-H) = E[(log π + 1) ∇log π] over tokens of π, and E[∇log π] = 0. It equals `kl.k2` against a
    uniform reference, up to a constant in the factor. It needs the log-probability alone; tokens of
    an older policy need their importance weight.
    """
    return logprobs.square() / 2
