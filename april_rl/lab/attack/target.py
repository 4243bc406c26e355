"""A prompt under attack, and the styles in which a response can state its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from april_rl.answers.extraction import gold_answer, normalise
from april_rl.lab.attack.forms import FORMS, another_answer
from april_rl.task.rewards.builtin.short import value_of
from april_rl.types import Prompt

_FORMS = {**FORMS, "answer tag": "<answer>{answer}</answer>", "hashes": "#### {answer}"}


class Style(NamedTuple):
    """How a response states its answer: in which form, and whether thoughts in tags precede it."""

    form: str
    thinks: bool = False

    def state(self, answer: str) -> str:
        """Return a response that states an answer."""
        thoughts = "<think>\nSome work.\n</think>\n" if self.thinks else ""
        return thoughts + _FORMS[self.form].format(answer=answer)

    def __str__(self) -> str:
        return f"{self.form} after <think>" if self.thinks else self.form


STYLES = tuple(Style(form, thinks) for thinks in (False, True) for form in _FORMS)


class Target(NamedTuple):
    """A prompt, what would be right, and what would be wrong."""

    prompt: Prompt
    answer: str  # the right answer as a response would state it
    others: Sequence[str]  # wrong answers [at least 1]
    style: Style = STYLES[0]  # in which the reward reads an answer

    @property
    def wrong(self) -> str:
        return self.state(self.others[0])

    @property
    def thoughts(self) -> str:
        """Return thoughts, still open, that state the right answer."""
        return f"<think>\n{self.style._replace(thinks=False).state(self.answer)}"

    def state(self, *answers: str) -> str:
        """Return a response that states the answers, each on its own."""
        return "\n".join(map(self.style.state, answers))

    def among_wrong(self) -> list[str]:
        """Return wrong answers with the right one in their middle."""
        return [*self.others[:2], self.answer, *self.others[:1], *self.others[2:]]


def targets(prompts: Sequence[Prompt], *, num: int) -> list[Target]:
    """Return at most `num` of the prompts, spread evenly over the set."""
    num = min(num, len(prompts))
    chosen = [prompts[place * len(prompts) // num] for place in range(num)]
    answers = [gold_answer(prompt.answer) for prompt in chosen]
    return [
        Target(prompt, answer, _others(answer, answers))
        for prompt, answer in zip(chosen, answers, strict=True)
    ]


def _others(answer: str, answers: Sequence[str]) -> list[str]:
    """Return answers that differ from `answer`, as text and in their last number."""
    found: list[str] = []
    for other in (another_answer(answer), *answers):
        if not any(_may_equal(other, known) for known in (answer, *found)):
            found.append(other)
    return found[:4] or [f"not {answer}"]


def _may_equal(one: str, other: str) -> bool:
    number = value_of(one)
    is_same_number = number is not None and number == value_of(other)
    return is_same_number or normalise(one).casefold() == normalise(other).casefold()
