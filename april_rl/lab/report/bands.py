"""When a metric left its band: the range of its own past steps, widened."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import count
from math import exp, log
from statistics import fmean, linear_regression
from typing import NamedTuple

BAD = "loss/bad_step"  # 1: the step was skipped, which no past makes usual
_PAST, _LEAST = 30, 10  # steps that make a band: at most, and at least
_FAR, _NEAR = 3.0, 0.5  # widths outside: one step is enough; a second step after one that is nearer
_RUN, _EDGE, _KNOWN = 4, 0.1, 20  # steps whose mean may be nearer still; the past that it needs
_TOGETHER = 2  # steps within which others left theirs with the first


class _Watched(NamedTuple):
    """A metric that may leave its band."""

    key: str  # a regular expression
    width: float  # least width of the band; of the logarithm, if there is a floor
    floor: float = 0.0  # values below it count as equal
    rises_only: bool = False  # falls are ignored
    lasting: tuple[int, ...] = (1,)  # 1, -1: a smaller rise or fall that lasts is a departure, too


_WATCHED = (
    _Watched("loss/lr", 0.01, floor=1e-30),
    _Watched("mismatch/logprob_abs_mean", 0.5, floor=1e-6, rises_only=True),
    _Watched("rollout/prompt_tokens_mean", 0.2, floor=1.0, lasting=(1, -1)),
    _Watched(r"reward/mean|source/[^/]+/reward_mean", 0.1, lasting=(-1,)),
    _Watched("loss/grad_norm", 0.5, floor=1e-6),
    _Watched("loss/behaviour_kl", 1.0, floor=1e-4, rises_only=True),
    _Watched("loss/is_weight_mean", 0.02, lasting=(1, -1)),
    _Watched("loss/(clip|masked)_frac", 0.02, rises_only=True),
    _Watched("loss/entropy", 0.7, floor=0.01, lasting=()),
    _Watched("rollout/response_tokens_mean", 0.3, floor=1.0),
    _Watched("rollout/truncated_frac", 0.1, rises_only=True),
)


class Departure(NamedTuple):
    """A metric that left its band."""

    step: int
    excess: float  # widths of the range that the value is outside of it
    key: str
    value: float
    low: float
    high: float

    def holds(self, value: float | None) -> bool:
        """Return whether another value of the step would be inside the band."""
        return value is not None and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{self.key} {self.value:.3g} (band {self.low:.3g} to {self.high:.3g})"


def departures(rows: Sequence[Mapping[str, float | None]]) -> list[Departure]:
    """Return the first metric that left its band in the rows of a run, and those that left theirs
    within two steps, the first and farthest first; none if all stay.
    """
    series = {
        key: {int(row["step"] or 0): v for row in rows if (v := row.get(key)) is not None}
        for key in {key for row in rows for key in row}
    }
    bad = [step for step, value in series.get(BAD, {}).items() if value]
    found = [Departure(step, _FAR, BAD, 1, 0, 0) for step in bad[:1]]
    for watched in _WATCHED:
        for key in filter(re.compile(watched.key).fullmatch, series):
            found += _first(watched, key, series[key])
    first = min((each.step for each in found), default=0)
    together = (each for each in found if each.step <= first + _TOGETHER)
    return sorted(together, key=lambda each: (each.step, -each.excess))


def departure_line(found: Sequence[Departure]) -> str:
    """Return a sentence on what left its band, and with it."""
    others = ", ".join(each.key for each in found[1:])
    return f"step {found[0].step} {found[0]} left its band{f', with {others}' * bool(others)}"


def _first(watched: _Watched, key: str, series: Mapping[int, float]) -> list[Departure]:
    steps, floor = [*series], watched.floor
    values = [log(max(value, floor)) if floor else value for value in series.values()]
    for at in range(_LEAST, len(values)):
        past, then = values[max(0, at - _PAST) : at], values[at : at + _RUN]
        low, high = min(past), max(past)
        if low <= values[at] <= high or (watched.rises_only and values[at] < low):
            continue
        width = max(high - low, watched.width)
        # Outside is what leaves the range and, around a straight line through it, too.
        slope, start = linear_regression(range(len(past)), past)
        rests = [value - start - slope * place for place, value in enumerate(past)]
        lines = (start + slope * place for place in count(len(past)))
        *near, mean = (
            min(max(v - high, low - v), max(v - line - max(rests), min(rests) - v + line)) / width
            for v, line in zip((*then, fmean(then)), lines, strict=False)
        )
        is_far = near[0] > _FAR or (near[0] > 1 and max(near[1:3], default=1.0) > _NEAR)
        is_lasting = (1 if values[at] > high else -1) in watched.lasting and at >= _KNOWN
        if is_far or (is_lasting and len(then) == _RUN and min(near[0], mean) > _EDGE):
            margin = width * (1.0 if is_far else _EDGE)
            low, high = (exp(e) if floor else e for e in (low - margin, high + margin))
            return [Departure(steps[at], near[0], key, series[steps[at]], low, high)]
    return []
