"""Whether the answer of a response equals the answer of the data set, by math-verify.

The soft time limit is one alarm around everything, not math-verify's own: that one starts anew for
parsing and for each comparison, and turns a timeout into "wrong". Signals need the main thread of a
process: this is for the processes of the reward pool.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from math_verify import parse, verify

from april_rl.rewards.extraction import gold_answer, normalised, stated_answers
from april_rl.rewards.jobs import Disagreement
from april_rl.rewards.plain_values import are_equal

ALARM_AGAIN_S = (
    0.1  # some libraries swallow what a signal raises: it is raised until it comes through
)

logging.getLogger("math_verify").setLevel(
    logging.ERROR
)  # it warns that its own time limits are off


class SoftTimeoutError(BaseException):
    """The time is over. Not an Exception, so that math-verify and sympy let it pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What math-verify makes of a response."""

    value: float  # 1.0: right, 0.0: wrong
    disagreement: Disagreement | None = None  # with the exact comparison of plain numbers


def score_math(response: str, answer: str, *, how: str = "auto", soft_timeout_s: float) -> float:
    """Return 1.0 when the answer that the response states equals `answer`, else 0.0.

    `how` is where the answer stands, as `reward.extract` (see `extraction.stated_answers`). A
    response that states several different answers is wrong, whichever of them is right, and so is
    what math-verify cannot read. Raises SoftTimeoutError.
    """
    return compare_math(response, answer, how=how, soft_timeout_s=soft_timeout_s).value


def compare_math(response: str, answer: str, *, how: str, soft_timeout_s: float) -> Compared:
    """Return what `score_math` does, and whether an exact comparison says otherwise."""
    with alarm(soft_timeout_s):
        stated = stated_answers(response, how)
        if not stated:
            return Compared(value=0.0)
        expected, last = gold_answer(answer), stated[-1]
        is_equal = _is_equal(expected, last)
        disagreement = None
        if are_equal(expected, last) is (not is_equal):
            disagreement = Disagreement(expected=expected, stated=last, value=float(is_equal))
        if not is_equal:
            return Compared(value=0.0, disagreement=disagreement)
        others = {normalised(text): text for text in stated}
        del others[normalised(last)]
        is_right = all(_is_equal(last, text) for text in others.values())
        return Compared(value=float(is_right), disagreement=disagreement)


def _is_equal(expected: str, text: str) -> bool:
    """Return whether math-verify takes the two expressions for equal; the first is the truth."""
    parsed_expected, parsed = (
        parse(f"\\boxed{{{part}}}", parsing_timeout=None) for part in (expected, text)
    )
    return bool(verify(parsed_expected, parsed, timeout_seconds=None))


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise SoftTimeoutError in the body when it takes longer."""
    before = signal.signal(signal.SIGALRM, _raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, seconds, ALARM_AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _raise_timeout(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001
    """The signal's handler."""
    raise SoftTimeoutError
