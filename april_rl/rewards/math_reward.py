"""Whether the last boxed expression of a response equals the answer, by math-verify.

The soft time limit is one alarm around everything, not math-verify's own: that one starts anew for
parsing and for each comparison, and turns a timeout into "wrong". Signals need the main thread of a
process: this is for the processes of the reward pool.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from math_verify import parse, verify

BOXED = "\\boxed{"
ALARM_AGAIN_S = (
    0.1  # some libraries swallow what a signal raises: it is raised until it comes through
)

logging.getLogger("math_verify").setLevel(
    logging.ERROR
)  # it warns that its own time limits are off


class SoftTimeoutError(BaseException):
    """The time is over. Not an Exception, so that math-verify and sympy let it pass."""


def last_boxed(text: str) -> str | None:
    """What stands in the last complete \\boxed{...}, braces balanced; None when there is none."""
    start = text.rfind(BOXED)
    while start >= 0:
        content = _balanced(text, start + len(BOXED))
        if content is not None:
            return content
        start = text.rfind(BOXED, 0, start)
    return None


def score_math(response: str, answer: str, *, soft_timeout_s: float) -> float:
    """1.0 when the last boxed expression equals the answer, else 0.0; raises SoftTimeoutError.

    Only the last box is looked at: faster, and an answer cannot hedge. What math-verify cannot read
    is wrong.
    """
    boxed = last_boxed(response)
    if boxed is None:
        return 0.0
    gold = last_boxed(answer) or answer
    with alarm(soft_timeout_s):
        parsed_gold, parsed = (
            parse(f"{BOXED}{text}}}", parsing_timeout=None) for text in (gold, boxed)
        )
        return float(verify(parsed_gold, parsed, timeout_seconds=None))


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


def _balanced(text: str, start: int) -> str | None:
    """From `start` to the brace that closes the one before it; escaped braces count for nothing."""
    depth, place = 1, start
    while place < len(text):
        character = text[place]
        if character == "\\":
            place += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start:place]
        place += 1
    return None
