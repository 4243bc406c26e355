"""Compares the answer of a response with the data set's answer by math-verify.

The soft time limit is one alarm around the whole comparison. math-verify's own limit starts
again for parsing and for each comparison, and turns a timeout into "wrong". Signals need the
main thread, so this runs in the processes of the reward pool only.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from april_rl.rewards.extraction import gold_answer, normalise, stated_answers
from april_rl.rewards.maths.compare import are_equal_answers

ALARM_AGAIN_S = 0.1  # the exception of a signal is raised again, because some libraries swallow it


class SoftTimeoutError(BaseException):
    """The time limit has passed. Not an Exception, so that math-verify and sympy do not
    catch it.
    """


def score_math(response: str, answer: str, *, how: str = "auto", soft_timeout_s: float) -> float:
    """Return 1.0 when the answer that the response states equals `answer`, else 0.0.

    `how` says where to find the answer, as in `reward.extract` (see
    `extraction.stated_answers`). A response that states several different answers is wrong, even
    if one of them is right, and so is one that math-verify cannot read. Raise SoftTimeoutError.
    """
    with alarm(soft_timeout_s):
        gold = gold_answer(answer)
        stated = list({normalise(text): text for text in stated_answers(response, how)}.values())
        if stated and all(are_equal_answers(gold, text) for text in stated):
            return 1.0
        return float(len(stated) > 1 and are_equal_answers(gold, ", ".join(stated)))


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise SoftTimeoutError in the body when it takes longer than `seconds`."""
    before = signal.signal(signal.SIGALRM, _raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, seconds, ALARM_AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _raise_timeout(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise SoftTimeoutError
