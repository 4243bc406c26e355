"""What is added to a reward for reasons other than the answer."""

from __future__ import annotations


def soft_overlong_penalty(
    num_tokens: int, *, max_response_tokens: int, buffer_tokens: int, penalty: float
) -> float:
    """What to add to the reward of so long a response; Yu et al. 2025 (DAPO), eq. 13.

    0 up to max_response_tokens - buffer_tokens, falling linearly through the buffer, -penalty at
    and beyond max_response_tokens. `buffer_tokens` 0 turns it off: always 0.
    """
    if buffer_tokens == 0:
        return 0.0
    over = num_tokens - (max_response_tokens - buffer_tokens)
    return -penalty * min(max(over / buffer_tokens, 0.0), 1.0)
