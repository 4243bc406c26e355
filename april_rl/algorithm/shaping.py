"""Terms added to a reward for reasons other than the answer.

Legend: [G] samples of a group.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def soft_overlong_penalty(
    num_tokens: ArrayLike, *, max_response_tokens: int, buffer_frac: float, penalty: float
) -> NDArray[np.float64]:
    """Return what to add to the rewards of responses of these lengths [G]; Yu et al. 2025 (DAPO),
    eq. 13.

    The buffer is the last `buffer_frac` of max_response_tokens. The result is 0 before it, falls
    linearly through it, and is -penalty at its end. With `buffer_frac` 0 it is always 0.
    """
    lengths = np.asarray(num_tokens, dtype=np.float64)
    if buffer_frac == 0:
        return np.zeros_like(lengths)
    buffer_tokens = buffer_frac * max_response_tokens
    over = lengths - (max_response_tokens - buffer_tokens)
    # np.clip takes several times as long for a small array.
    share: NDArray[np.float64] = np.minimum(np.maximum(over / buffer_tokens, 0.0), 1.0)
    return -penalty * share
