"""How per-token losses become one number: a loss weight for every token, computed only from
lengths and token weights.

Legend: [R] response tokens of a sample; m the token weights, of every response of a global
minibatch, over all ranks. m is 0 for a masked token, otherwise its age weight. The loss is Σ loss
weight · loss over all tokens, so a rank or a micro-batch needs no division of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from april_rl.config.choices import Aggregation

Floats32 = NDArray[np.float32]

# Maps the token weights [R] of each response to its loss weights [R].
Aggregate = Callable[[Sequence[Floats32]], list[Floats32]]


def aggregate(chosen: Aggregation, *, max_response_tokens: int) -> Aggregate:
    """Return the function of algorithm.aggregation for this response budget."""
    match chosen:
        case Aggregation.token_mean:
            return token_mean
        case Aggregation.sequence_mean:
            return sequence_mean
        case Aggregation.constant_length:
            return partial(constant_length, max_response_tokens=max_response_tokens)


def token_mean(token_weights: Sequence[Floats32]) -> list[Floats32]:
    """m / Σ m, by response [R]: every token counts the same; Yu et al. 2025 (DAPO), eq. 8.

    The weights add up to 1; a long response weighs more than a short one.
    """
    total = float(sum(weights.sum(dtype=np.float64) for weights in token_weights))
    return [_divide(weights, total) for weights in token_weights]


def sequence_mean(token_weights: Sequence[Floats32]) -> list[Floats32]:
    """m / (n · Σ over responses of mean m), by response [R], n its tokens with m > 0; Shao et al.
    2024 (GRPO), eq. 3.

    Without age weights this is 1 / (n · responses): every response counts the same, so a token of a
    long one counts less. Age weights lower a stale response relative to fresh ones, not the whole
    batch: the weights add up to 1. A response that is masked completely is not counted.
    """
    counts = [int((weights > 0).sum()) for weights in token_weights]
    shares = [
        weights / np.float32(max(count, 1))
        for weights, count in zip(token_weights, counts, strict=True)
    ]
    return token_mean(shares)


def constant_length(
    token_weights: Sequence[Floats32], *, max_response_tokens: int
) -> list[Floats32]:
    """m / (max_response_tokens · responses with any m > 0), by response [R]; Liu et al. 2025 (Dr.
    GRPO), section 3.2.

    A token counts the same in short and long responses and in every batch: the denominator depends
    neither on the lengths of responses nor on age weights. The weights add up to the mean length's
    share of the budget, so a learning rate does not carry over from the other two.
    """
    num_responses = sum(bool(weights.any()) for weights in token_weights)
    total = float(max_response_tokens * num_responses)
    return [_divide(weights, total) for weights in token_weights]


def _divide(weights: Floats32, total: float) -> Floats32:
    """Return `weights` / `total`, or zeros if the total is zero."""
    if not total:
        return np.zeros_like(weights)
    return (weights / total).astype(np.float32)
