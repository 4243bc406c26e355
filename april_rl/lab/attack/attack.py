"""Attacks the reward of a run on some prompts of a set.

An attack is paid where the reward gives it more than an honest wrong answer to the same prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from april_rl.lab.attack.attacks import ATTACKS
from april_rl.lab.attack.programs import block
from april_rl.lab.attack.target import STYLES, Style, Target, targets
from april_rl.task.rewards.jobs import RewardError
from april_rl.task.rewards.pool import RewardPool
from april_rl.task.rewards.scorebook import total
from april_rl.types import Prompt

_MORE = 1e-6  # a smaller difference between two rewards is rounding

Pay = Callable[[Prompt, str], float | None]  # the reward of a response; None: no score


class Trial(NamedTuple):
    """One response to one prompt that deserves nothing, and what it was paid."""

    target: Target
    response: str
    paid: float | None  # None: the reward raised, gave no score, or its process died
    honest: float  # the most that an honest wrong answer to the prompt is paid


class AttackResult(NamedTuple):
    """An attack on some prompts of a set."""

    name: str  # in ATTACKS
    trials: Sequence[Trial]  # none where it does not apply to any prompt

    @property
    def wins(self) -> list[Trial]:
        limits = ((each, each.honest + _MORE) for each in self.trials)
        return [each for each, least in limits if each.paid is not None and each.paid > least]


class Honest(NamedTuple):
    """The rewards of honest answers to some prompts of a set."""

    style: Style  # in which an answer is paid best
    right: float | None  # mean reward of right answers in it; None: no answer is read
    wrong: Sequence[float]  # the most that a wrong answer to each prompt is paid

    @property
    def is_blind(self) -> bool:
        """Return whether right answers are paid no more than wrong ones."""
        return self.right is not None and self.right <= fmean(self.wrong) + _MORE


def pay_by(rewards: RewardPool) -> Pay:
    """Return a function that scores one response as a group of its own."""

    def pay(prompt: Prompt, response: str) -> float | None:
        [scores] = rewards.try_on(prompt, [response])
        return total(rewards.functions, scores).value

    return pay


def attack_set(
    prompts: Sequence[Prompt],
    pay: Pay,
    *,
    num: int,
    reads_answers: bool,
    names: Collection[str] = ATTACKS,
) -> tuple[Honest, Iterator[AttackResult]]:
    """Return the rewards of honest answers to `num` of the prompts, and the attacks on the same
    prompts as they are made. Raise RewardError when no right answer gets a score.
    """
    aimed = targets(prompts, num=num)
    honest = _honest(aimed, pay, reads_answers=reads_answers)
    made = (AttackResult(name, [*_trials(name, aimed, honest, pay)]) for name in names)
    return honest, made


def _honest(aimed: Sequence[Target], pay: Pay, *, reads_answers: bool) -> Honest:
    """Find the style in which answers are paid best: right ones, if any are read. Return what
    wrong ones get in it, and wrong programs, which a reward that reads answers takes for none.
    """

    def scores(*responses: tuple[Target, str]) -> list[float]:
        found = (pay(target.prompt, response) for target, response in responses)
        return [score for score in found if score is not None]

    stated = {
        style: scores(
            *((t, style.state(t.answer if reads_answers else t.others[0])) for t in aimed)
        )
        for style in STYLES
    }
    if not any(stated.values()):
        raise RewardError("the reward gives no answer a score, in any form")
    best = max(STYLES, key=lambda style: fmean(stated[style] or [float("-inf")]))
    programs = [] if reads_answers else [block("pass"), block("print()")]
    wrong = [
        max(scores(*((t, text) for text in (*map(best.state, t.others), *programs))), default=0.0)
        for t in aimed
    ]
    return Honest(best, fmean(stated[best]) if reads_answers else None, wrong)


def _trials(name: str, aimed: Sequence[Target], honest: Honest, pay: Pay) -> Iterator[Trial]:
    for target, wrong in zip(aimed, honest.wrong, strict=True):
        response = ATTACKS[name].respond(target._replace(style=honest.style))
        if response is None:
            continue
        try:
            paid = pay(target.prompt, response)
        except RewardError:  # the response has ended the process of the reward
            paid = None
        yield Trial(target, response, paid, wrong)
