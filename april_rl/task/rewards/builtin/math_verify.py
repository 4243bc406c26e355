"""`math_verify`: 1.0 when math-verify takes the answer of the response as right, else 0.0.

An answer that math-verify cannot read is wrong. A response on which it takes longer than a third of
`reward.hard_timeout_s` gets 0.0 and counts in `reward/soft_timeouts`.

That time limit is one alarm around everything. math-verify's own limit starts again for parsing and
for each comparison, and turns a timeout into "wrong". Signals need the main thread, so this runs in
the processes of the reward pool only.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from april_rl.answers.compare import are_equal_answers
from april_rl.answers.extraction import gold_answer, normalise, stated_answers
from april_rl.task.rewards.loading import Reward, RewardContext, SoftTimeout, each_response

START_S = 30.0  # limit of the first call
ALARM_AGAIN_S = 0.1  # some libraries swallow the exception of a signal, so it is raised again


class SoftTimeoutError(BaseException):
    """The time limit has passed. Not an Exception, which math-verify and sympy would catch."""


def build(context: RewardContext) -> Reward:
    """Return the function; it takes no arguments."""
    # math-verify loads libraries at its first call; that must not count against a response.
    score_math(r"\boxed{1}", "1", soft_timeout_s=START_S)

    def value(response: str, answer: str) -> float:
        try:
            return score_math(
                response, answer, how=context.extract, soft_timeout_s=context.soft_timeout_s
            )
        except SoftTimeoutError:
            return SoftTimeout(0.0)

    return each_response(value)


def score_math(response: str, answer: str, *, how: str = "auto", soft_timeout_s: float) -> float:
    """Return 1.0 when the answer that the response states equals `answer`, else 0.0.

    `how` says where the answer stands, as in `reward.extract` (see `extraction.stated_answers`). A
    response that states several different answers is wrong, even if one of them is right, and so is
    one that math-verify cannot read. Raise SoftTimeoutError.
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
