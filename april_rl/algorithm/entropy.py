"""An entropy bonus as a term of the loss: the negative entropy of the next-token distribution.

Legend: [T] trained tokens, nats, at the sampling temperature.
"""

from __future__ import annotations

import torch
from torch import Tensor


def negative_entropy(entropy: Tensor) -> Tensor:
    """-H [T] of entropies that have a gradient; an entropy without one would change nothing.

    Exact for every distribution met, whoever sampled the token; its gradient needs the whole
    vocabulary's.
    """
    assert entropy.requires_grad or not torch.is_grad_enabled(), (
        "an entropy without a gradient gives no bonus: use sampled_negative_entropy"
    )
    return -entropy


def sampled_negative_entropy(logprobs: Tensor) -> Tensor:
    """½ (log π)² [T] of the sampled token: its gradient is unbiased for that of -H, its value is
    not -H.

    ∇(-H) = E[(log π + 1) ∇log π] over tokens of π, and E[∇log π] = 0. It is `kl.k2` against a
    uniform reference, but for a constant in the factor. Needs nothing beyond the log-probability;
    tokens of an older policy need their importance weight.
    """
    return logprobs.square() / 2
