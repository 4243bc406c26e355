"""Evaluated sets, and the difference of two evaluations, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from april_rl.tracking.figures import compact, percent


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow:
    """A set as the table shows it."""

    name: str
    num_prompts: int
    num_samples: int  # k
    temperature: float
    top_p: float
    estimates: Mapping[str, str]  # value and interval of avg_at_k, pass_at_k, maj_at_k
    response_tokens_mean: float
    truncated_frac: float
    errors: int


def evaluation_table(rows: Sequence[EvaluationRow], *, title: str) -> Table:
    """Return a row for every set: what was asked, the figures with their 95 % intervals over
    prompts, and what makes them doubtful.
    """
    table = Table(title=title)
    heads = ("prompts", "k", "T", "top-p", "avg@k", "pass@k", "maj@k", "tokens", "cut off")
    for head in ("set", *heads, "errors"):
        table.add_column(head, justify="left" if head == "set" else "right", no_wrap=True)
    for row in rows:
        figures = [row.estimates.get(f"{kind}_at_k", "-") for kind in ("avg", "pass", "maj")]
        table.add_row(
            row.name,
            str(row.num_prompts),
            str(row.num_samples),
            f"{row.temperature:g}",
            f"{row.top_p:g}",
            *figures,
            compact(row.response_tokens_mean),
            percent(row.truncated_frac),
            str(row.errors),
        )
    return table


def difference_lines(
    name: str, *, num_prompts: int, changes: Mapping[str, str], notes: Sequence[str]
) -> list[str]:
    """Return what is said of a set that two evaluations have in common; `changes` are values with
    their intervals.
    """
    found = ", ".join(f"{key.partition('_')[0]}@k {value}" for key, value in changes.items())
    lines = [f"{name}, {num_prompts} common prompts: {found}"]
    if notes:
        lines.append(f"  not sampled alike: {', '.join(notes)}")
    return lines
