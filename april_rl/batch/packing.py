"""Scored groups to packed rows: no padding, equal micro-batch counts on every rank, per-token loss weights.

Legend: [T] positions of a packed row. Everything is aligned to the *predicting* position: position t carries what
belongs to the token at t + 1 of the same sequence, so a sequence of P + R tokens has its response at positions
P - 1 … P + R - 2 and nothing at its last position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from april_rl.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One packed row: what the learner computes in one forward and backward pass."""

    lengths: tuple[int, ...]  # tokens of each sequence; Σ lengths = T
    token_ids: NDArray[np.int64]  # [T]
    position_ids: NDArray[np.int64]  # [T], from 0 within each sequence
    labels: NDArray[np.int64]  # [T], the next token; 0 where there is no response token to predict
    response_mask: NDArray[np.bool_]  # [T], whether this position predicts a response token
    behaviour_logprobs: NDArray[np.float32]  # [T], nats
    advantages: NDArray[np.float32]  # [T]
    ages: NDArray[np.int32]  # [T], policy versions between sampling and this update; 0 outside the response
    loss_weights: NDArray[np.float32]  # [T], mask · age weight ÷ global denominator; Σ over the minibatch = 1
