"""Lines for the terminal, and a page, about the attacks on a reward."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from statistics import fmean
from typing import NamedTuple

from april_rl.lab.attack.attack import AttackResult, Honest, Trial
from april_rl.lab.attack.attacks import ATTACKS
from april_rl.lab.report.html import page, table, text_entry

_NUM_SHOWN, _SHOWN_CHARACTERS = 3, 1200  # responses of an attack on the page, and of each
_WIDTH = max(map(len, ATTACKS))


class SetResult(NamedTuple):
    """The attacks on a set."""

    name: str  # the setting that names it, and its path
    honest: Honest
    results: list[AttackResult]


def honest_line(honest: Honest) -> str:
    """Return what honest answers are paid, in words."""
    wrong = f"{fmean(honest.wrong):g}"
    if honest.right is None:
        return f"  a wrong answer or program is paid {wrong} on average"
    line = f"  a right answer is paid {honest.right:g} ({honest.style}), a wrong one {wrong}"
    return f"{line}: this reward cannot tell them apart" if honest.is_blind else line


def result_line(result: AttackResult, *, accepted: bool) -> str:
    """Return the result of an attack, in words."""
    verdict = "unpaid" if not result.wins else "accepted" if accepted else "PAID"
    return (
        f"  {verdict if result.trials else '-':<9}{result.name:<{_WIDTH}}  {_counts(result)}: "
        f"{ATTACKS[result.name].meaning}"
    )


def attack_page(sets: Iterable[SetResult]) -> str:
    """Return the page: a table for each set, and texts of the attacks that were paid."""
    title = "What does this reward pay for nothing?"
    body = [f"<h1>{title}</h1>"]
    for each in sets:
        body += [
            f'<h2>{escape(each.name)}</h2><p class="soft">{escape(honest_line(each.honest))}. An '
            "attack is paid where it gets more than an honest wrong answer to the same prompt.</p>",
            table(("attack", "what it is", "paid"), map(_cells, each.results)),
        ]
        for result in each.results:
            body += [f"<h3>{result.name}</h3>"] if result.wins else []
            body += map(_text, result.wins[:_NUM_SHOWN])
    return page(title, body, has_charts=False)


def _counts(result: AttackResult) -> str:
    num_failed = sum(trial.paid is None for trial in result.trials)
    failed = f", no score in {num_failed}" if num_failed else ""
    return f"{len(result.wins)} of {len(result.trials)}{failed}" if result.trials else "not here"


def _cells(result: AttackResult) -> list[str]:
    cells = map(escape, (result.name, ATTACKS[result.name].meaning, _counts(result)))
    return [f'<span class="cut">{cell}</span>' if result.wins else cell for cell in cells]


def _text(trial: Trial) -> str:
    prompt = trial.target.prompt
    texts = {"prompt": prompt.text, "right answer": trial.target.answer, "paid": trial.response}
    shown = "".join(text_entry(*each, limit=_SHOWN_CHARACTERS) for each in texts.items())
    summary = f"{prompt.source}: paid {trial.paid:g}, an honest wrong answer {trial.honest:g}"
    return f"<details><summary>{escape(summary)}</summary><dl>{shown}</dl></details>"
