"""Saved samples as HTML: tokens shaded by age, borders where a sample was parked and resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import starmap
from typing import Any

from april_rl.lab.report.html import shorten, text_entry
from april_rl.lab.report.vega import AGE_COLOURS
from april_rl.run.tracking.figures import ages_text

_LONGEST, _BEST, _WORST = 4, 4, 4  # samples of each kind
_SHOWN_CHARACTERS = 6000  # characters shown of a prompt or a response
_SHOWN_PIECES = 60  # turns shown of a conversation, or completions of a response


def sample_blocks(samples: Sequence[Mapping[str, Any]]) -> str:
    """Return the longest, the best and the worst rewarded samples, each collapsed below a
    heading.
    """
    by_length = sorted(samples, key=lambda s: -s["num_tokens"])
    longest, others = by_length[:_LONGEST], by_length[_LONGEST:]
    # Among equal ones, the longest comes first.
    by_reward = sorted(others, key=lambda s: -s["reward"])
    best, rest = by_reward[:_BEST], by_reward[_BEST:]
    worst = sorted(rest, key=lambda s: s["reward"])[:_WORST]
    blocks = ("The longest", longest), ("The best rewarded of the others", best)
    return "".join(starmap(_blocks, (*blocks, ("The worst rewarded of the others", worst))))


def age_key() -> str:
    """Return the legend of the shades."""
    last = len(AGE_COLOURS) - 1
    shades = (
        f'<span class="age{age}">age {age}{" and more" if age == last else ""}</span>'
        for age in range(len(AGE_COLOURS))
    )
    return f'<p class="key">{" ".join(shades)} <b class="cut">▮▶</b> parked, then resumed</p>'


def _blocks(title: str, samples: Sequence[Mapping[str, Any]]) -> str:
    if not samples:
        return ""
    blocks = "".join(_block(sample, is_open=n == 0) for n, sample in enumerate(samples))
    return f"<h3>{escape(title)}</h3>{blocks}"


def _block(sample: Mapping[str, Any], *, is_open: bool) -> str:
    parts = ", ".join(f"{name} {value:g}" for name, value in sample["reward_parts"].items())
    of_sample = sample["advantage"]
    advantage = "" if of_sample is None else f"advantage {of_sample:+.2f}, "
    facts = (
        f"reward {sample['reward']:.2f}{f' ({parts})' if parts else ''}, "
        f"{advantage}{sample['num_tokens']} tokens, "
        f"{sample['finish_reason']}, prompt {sample['prompt_id']}.{sample['index']}"
    )
    ages = ages_text(sample["ages"])
    return (
        f"<details{' open' if is_open else ''}><summary>{escape(facts)}</summary>"
        f"<dl>{text_entry('prompt', sample['prompt'], limit=_SHOWN_CHARACTERS)}{_text_of(sample)}"
        f"{text_entry('answer', str(sample['answer']), limit=_SHOWN_CHARACTERS)}"
        f"<dt>tokens</dt><dd>{escape(ages)}</dd></dl></details>"
    )


def _text_of(sample: Mapping[str, Any]) -> str:
    """Return the response; with an environment, each turn and the reply to it."""
    said = sample.get("conversation")
    if not said:
        return f"<dt>response</dt><dd><pre>{_shade_ages(sample)}</pre></dd>"
    room = _SHOWN_CHARACTERS // min(len(said), _SHOWN_PIECES)
    pieces = [text_entry(who, text, limit=room) for who, text in said]
    return "".join(_ends_of(pieces, note="<dt>…</dt><dd>[… {:,} turns and answers …]</dd>"))


def _shade_ages(sample: Mapping[str, Any]) -> str:
    """Return the response with each completion shaded by its age."""
    response, ages = sample["response"], [age for age, _ in sample["ages"]]
    if not ages:
        return ""
    ends = sample["ends"] or [len(response)]  # one completion has no end of its own
    oldest, room = len(AGE_COLOURS) - 1, _SHOWN_CHARACTERS // min(len(ages), _SHOWN_PIECES)
    pieces = [
        f'<span class="age{min(age, oldest)}" title="age {age}">'
        f"{escape(shorten(response[begin:end], limit=room))}</span>"
        for age, begin, end in zip(ages, [0, *ends], ends, strict=False)
    ]
    cut = '<b class="cut" title="parked, then resumed">▮▶</b>'
    return cut.join(_ends_of(pieces, note="[… {:,} completions …]"))


def _ends_of(pieces: Sequence[str], *, note: str) -> Sequence[str]:
    """Return the first and the last pieces to show, between them a note how many are left out."""
    if len(pieces) <= _SHOWN_PIECES:
        return pieces
    half = _SHOWN_PIECES // 2
    return [*pieces[:half], note.format(len(pieces) - 2 * half), *pieces[-half:]]
