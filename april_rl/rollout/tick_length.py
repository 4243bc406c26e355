"""How long a tick is with many engines, and how long to wait for several."""

from __future__ import annotations

# The controller is asked at most as often as by 64 engines every 8 steps.
_SHORTEST_TICK, _ENGINES_PER_STEP = 8, 8
_TICKS_PER_BUDGET = 64  # most responses have several, though they take a part of it only

_MANY_ENGINES, _GATHERED_TICK, _LONGEST_GATHER_S = 64, 1 / 4, 0.25


def auto_tick_steps(*, num_engines: int, max_response_tokens: int) -> int:
    """Engine steps of a tick with so many engines.

    Each tick costs the controller the same, so with hundreds of engines they are longer. The price
    is the stop: after the last group wanted, engines go on until the ticks under way end, with
    tokens that are trained a step later. Slots do not wait for it (`Slots`) as long as responses
    have several ticks, so those of a small budget keep short ones.
    """
    longest = min(num_engines // _ENGINES_PER_STEP, max_response_tokens // _TICKS_PER_BUDGET)
    return max(_SHORTEST_TICK, longest)


def gather_s(tick_s: float, *, num_engines: int) -> float:
    """How long to wait for the ticks of others, when one has ended and they take `tick_s`.

    Of many engines some always end within a fourth of a tick, and to take in what they bring
    together costs the controller less; each has its next tick already. Of few engines none may.
    """
    if num_engines < _MANY_ENGINES:
        return 0.0
    return min(_GATHERED_TICK * tick_s, _LONGEST_GATHER_S)
