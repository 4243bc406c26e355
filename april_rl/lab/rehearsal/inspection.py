"""Rendered prompts of a data set, and the rewards of right and wrong answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import indent
from typing import NamedTuple

import numpy as np

from april_rl.lab.attack.attack import Pay
from april_rl.lab.attack.forms import FORMS, another_answer, asked_form, state_answer
from april_rl.lab.rehearsal.findings import Finding
from april_rl.lab.report.html import shorten
from april_rl.types import Prompt

_NUM_TRIED = 4  # prompts whose answers are rated
_RIGHT = 1e-6  # a reward this close to the best one counts as equal to it


class FormsTried(NamedTuple):
    """Rewards of right and wrong answers to some prompts of a set."""

    asked: str | None  # the form that the prompts ask for
    right: Mapping[str, float]  # mean reward of the right answer in each form
    wrong: float  # largest mean reward of a wrong answer in any form

    @property
    def span(self) -> float:
        """Return the reward of a right answer in the best form less that of a wrong one."""
        return max(self.right.values()) - self.wrong


def try_forms(prompts: Sequence[Prompt], pay: Pay) -> FormsTried | None:
    """Rate right and wrong answers in every form, for some of the prompts; None if whole episodes
    with an environment are rewarded.
    """
    if prompts[0].has_environment:
        return None
    chosen = [
        prompts[i]
        for i in np.linspace(0, len(prompts) - 1, min(_NUM_TRIED, len(prompts))).astype(int)
    ]
    right = {
        form: _mean(pay, chosen, [state_answer(p.answer, form) for p in chosen]) for form in FORMS
    }
    wrong = (
        _mean(pay, chosen, [state_answer(another_answer(p.answer), form) for p in chosen])
        for form in FORMS
    )
    asked = {asked_form(prompt.text) for prompt in chosen}
    return FormsTried(asked.pop() if len(asked) == 1 else None, right, max(wrong))


def _mean(pay: Pay, prompts: Sequence[Prompt], responses: Sequence[str]) -> float:
    paid = map(pay, prompts, responses)
    rewards = [reward for reward in paid if reward is not None]
    return float(np.mean(rewards)) if rewards else float("nan")


def check_forms(tried: FormsTried | None, *, set_name: str) -> Iterator[Finding]:
    """Find a reward that does not read the form that the prompts ask for, or that rewards wrong
    answers.
    """
    if tried is None:
        return
    best = max(tried.right.values())
    good = [form for form, value in tried.right.items() if value >= best - _RIGHT]
    if not tried.span > 0:
        yield Finding(
            "reward_blind",
            f"{set_name}: the reward gives a right answer {best:g} in every form and a "
            f"wrong one {tried.wrong:g}: it cannot tell them apart",
        )
    elif tried.asked is not None and tried.right[tried.asked] < best - _RIGHT:
        yield Finding(
            "reward_form",
            f"{set_name}: the prompts ask for the form {tried.asked!r}, in which the "
            f"reward gives a right answer {tried.right[tried.asked]:g}; it reads "
            f"{' and '.join(good)} ({best:g}): change reward.extract or data.instruction",
        )
    elif tried.asked is None and len(set(tried.right.values())) > 1:
        yield Finding(
            "no_form_asked",
            f"{set_name}: the prompts ask for no form of the answer, and the reward "
            f"reads {' or '.join(good)} only: say so in data.instruction",
        )


def shown_set(key: str, prompts: Sequence[Prompt], tried: FormsTried | None) -> str:
    """Return the page of a set: its first prompt, and the rewards of answers."""
    return "\n".join(
        [
            f"data        {key}",
            f"  the first of {len(prompts):,} prompts, as the model sees it:",
            indent(shorten(prompts[0].text), "    | "),
            f"  its answer: {prompts[0].answer}",
            indent(forms_lines(tried), "  "),
        ]
    )


def forms_lines(tried: FormsTried | None) -> str:
    """Return the rewards of right and wrong answers, in words."""
    if tried is None:
        return "no answers were tried: an environment answers, or the reward reads none"
    right = ", ".join(f"{form} {value:g}" for form, value in tried.right.items())
    return "\n".join(
        [
            f"the prompts ask for the form: {tried.asked or 'none'}",
            f"reward of a right answer, by its form: {right}",
            f"reward of a wrong answer: at most {tried.wrong:g}",
        ]
    )
