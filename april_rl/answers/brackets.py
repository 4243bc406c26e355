r"""Splits LaTeX at separators that stand outside all brackets."""

from __future__ import annotations

import re

_BRACKET = re.compile(r"\\[{}]|\\[lr]angle|[()\[\]{}]")
_OPENING = frozenset(("(", "[", "{", r"\{", r"\langle"))
_THOUSANDS = re.compile(r",\d{3}(?!\d)")


def split(text: str, separator: re.Pattern[str], *, thousands: bool = True) -> list[str]:
    """Return the parts of `text` between separators outside brackets, stripped; a text without any
    is one part.

    With `thousands`, a comma that can separate thousands does not separate members, unless another
    comma without a space shows that the members stand close together.
    """
    marks = _outside_brackets(text, separator)
    if thousands:
        tight = [mark for mark in marks if mark[0] == "," and not text[mark.end() :][:1].isspace()]
        of_thousands = {mark for mark in tight if _is_of_thousands(text, mark.start())}
        if len(of_thousands) == len(tight):
            marks = [mark for mark in marks if mark not in of_thousands]
    starts = [0, *(mark.end() for mark in marks)]
    ends = [*(mark.start() for mark in marks), len(text)]
    return [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]


def closing(text: str, start: int) -> tuple[int, str]:
    """Return where the bracket opened before `start` closes, and how; (-1, "") if it does not."""
    depth = 1
    for bracket in _BRACKET.finditer(text, start):
        depth += 1 if bracket[0] in _OPENING else -1
        if depth == 0:
            return bracket.start(), bracket[0]
    return -1, ""


def depth(text: str) -> int:
    """Return how deep the brackets are nested."""
    deepest = level = 0
    for bracket in _BRACKET.findall(text):
        level += 1 if bracket in _OPENING else -1
        deepest = max(deepest, level)
    return deepest


def _outside_brackets(text: str, separator: re.Pattern[str]) -> list[re.Match[str]]:
    found: list[re.Match[str]] = []
    depth = position = 0
    while position < len(text):
        if bracket := _BRACKET.match(text, position):
            depth += 1 if bracket[0] in _OPENING else -1
            position = bracket.end()
        elif depth == 0 and (mark := separator.match(text, position)):
            found.append(mark)
            position = mark.end()
        else:
            position += 1
    return found


def _is_of_thousands(text: str, position: int) -> bool:
    """Return whether the comma at `position` stands between a digit and a group of three."""
    return (
        position > 0
        and text[position - 1].isdigit()
        and _THOUSANDS.match(text, position) is not None
    )
