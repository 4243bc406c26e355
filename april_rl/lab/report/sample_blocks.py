"""Saved samples as HTML: tokens shaded by age, borders where a sample was parked and resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import starmap
from typing import Any

from april_rl.lab.report.vega import AGE_COLOURS

_LONGEST, _BEST, _WORST = 4, 4, 4  # samples of each kind
_SHOWN_CHARACTERS = 6000  # of a prompt, or of a response


def sample_blocks(samples: Sequence[Mapping[str, Any]]) -> str:
    """Return the longest, the best and the worst rewarded samples, each behind a line that opens
    it.
    """
    by_length = sorted(samples, key=lambda s: -s["num_tokens"])
    longest, others = by_length[:_LONGEST], by_length[_LONGEST:]
    by_reward = sorted(others, key=lambda s: -s["reward"])  # the longest first of equal ones
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
    facts = (
        f"reward {sample['reward']:.2f}{f' ({parts})' if parts else ''}, "
        f"advantage {sample['advantage']:+.2f}, {sample['num_tokens']} tokens, "
        f"{sample['finish_reason']}, prompt {sample['prompt_id']}.{sample['index']}"
    )
    ages = ", ".join(f"{tokens} of age {age}" for age, tokens in sample["ages"])
    return (
        f"<details{' open' if is_open else ''}><summary>{escape(facts)}</summary>"
        f"<dl><dt>prompt</dt><dd><pre>{escape(_cut(sample['prompt']))}</pre></dd>"
        f"{_said(sample)}"
        f"<dt>answer</dt><dd><pre>{escape(_cut(str(sample['answer'])))}</pre></dd>"
        f"<dt>tokens</dt><dd>{escape(ages)}</dd></dl></details>"
    )


def _said(sample: Mapping[str, Any]) -> str:
    """Return the response; with an environment, each turn and what was said to it."""
    said = sample.get("conversation")
    if not said:
        return f"<dt>response</dt><dd><pre>{_shaded(sample)}</pre></dd>"
    room = _SHOWN_CHARACTERS // len(said)
    return "".join(
        f"<dt>{escape(who)}</dt><dd><pre>{escape(_cut(text, limit=room))}</pre></dd>"
        for who, text in said
    )


def _shaded(sample: Mapping[str, Any]) -> str:
    """Return the response, each completion with the shade of its age; samples of older runs, which
    do not say where completions end, have no shades.
    """
    response, ages = sample["response"], [age for age, _ in sample["ages"]]
    ends = sample.get("ends") or [len(response)]
    if len(ends) != len(ages):
        return escape(_cut(response))
    last, begin, pieces = len(AGE_COLOURS) - 1, 0, []
    room = _SHOWN_CHARACTERS // len(ages)
    for age, end in zip(ages, ends, strict=True):
        text = escape(_cut(response[begin:end], limit=room))
        pieces.append(f'<span class="age{min(age, last)}" title="age {age}">{text}</span>')
        begin = end
    return '<b class="cut" title="parked, then resumed">▮▶</b>'.join(pieces)


def _cut(text: str, *, limit: int = _SHOWN_CHARACTERS) -> str:
    """Return the text without its middle when it is long."""
    if len(text) <= limit:
        return text
    left_out = len(text) - limit
    return f"{text[: limit // 2]}\n[… {left_out:,} characters …]\n{text[-(limit // 2) :]}"
