"""Where the answer of a response is read: in a box, on an `Answer:` line, or the last number.

Every pattern here takes time linear in the length of the response, whatever the response is.
"""

from __future__ import annotations

import re
from typing import NamedTuple

THINK_START, THINK_END = "<think>", "</think>"

# A box opens, something is escaped (so that its brace does not count), or a brace.
_BRACES = re.compile(r"(?P<box>\\{1,2}boxed\s*\{)|\\.|[{}]", re.DOTALL)
_ANSWER_LINE = re.compile(
    r"^[ \t>*_#`-]*answer[ \t*_`]*:(?P<answer>[^\n]*)$", re.IGNORECASE | re.MULTILINE
)
_NUMBER = re.compile(
    r"(?:(?<![\w).])-)?"
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    r"(?:[eE][+-]?\d+)?(?:/\d+)?"
)
_SPACES = re.compile(r"\s+|\\[,;:! ]|\\(?:left|right)(?![a-zA-Z])|[$~]")
_FRACTION = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_MARKUP = " \t\r\n*_`$"


class Statement(NamedTuple):
    """An answer that a response states, and where."""

    start: int  # characters from the beginning of the text that was searched
    text: str


def extract_answer(response: str, how: str) -> str | None:
    """Return the answer of a response as text, None when there is none.

    `how` is boxed, answer_line, last_number or auto, as `reward.extract`. Of several answers the
    last one is returned, also where `stated_answers` finds others before it.
    """
    found = stated_answers(response, how)
    return found[-1] if found else None


def stated_answers(response: str, how: str) -> list[str]:
    """Return every answer that a response states in the form `how`, in order; empty: none.

    Only what follows the last `</think>` is read; a response whose `<think>` is not closed has no
    answer. `boxed`: what stands in each complete \\boxed{...}; of nested boxes the innermost.
    `answer_line`: what follows `Answer:` at the beginning of a line, with a box in that line what
    stands in the box. `auto`: as answer_line when an answer line stands last, else as boxed.
    `last_number`: one number, the last, for numbers before it are working and not answers.
    """
    text = after_thinking(response)
    if text is None:
        return []
    if how == "last_number":
        return [numbers[-1]] if (numbers := _numbers(text)) else []
    boxes = _boxes(text)
    if how == "boxed":
        return _texts(boxes)
    lines, end = _answer_lines(text, boxes)
    is_box_last = how == "auto" and bool(boxes) and boxes[-1].start >= end
    return _texts(boxes if is_box_last else lines)


def after_thinking(response: str) -> str | None:
    """Return what follows the last `</think>`, the whole response without one; None when thinking
    has begun and not ended.
    """
    text = response.rpartition(THINK_END)[2]
    return None if THINK_START in text else text


def last_boxed(text: str) -> str | None:
    """Return what stands in the last complete \\boxed{...}, braces balanced; None without one."""
    boxes = _boxes(text)
    return boxes[-1].text if boxes else None


def gold_answer(answer: str) -> str:
    """Return the answer of a data row as text to compare with: without box, `$` and markup."""
    boxed = last_boxed(answer)
    return bare(answer) if boxed is None else boxed


def bare(text: str) -> str:
    """Return a text without markdown emphasis, math delimiters and a period around it."""
    text = text.strip(_MARKUP)
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].strip(_MARKUP)
    if text[:2] + text[-2:] in (r"\(\)", r"\[\]"):
        text = text[2:-2].strip(_MARKUP)
    return text


def normalised(answer: str) -> str:
    """Return an answer without what never changes its meaning: spaces, `$`, the size of fractions
    and brackets, commas between thousands, a period at the end.
    """
    text = _SPACES.sub("", bare(answer))
    return _THOUSANDS.sub("", _FRACTION.sub(r"\\frac", text))


def _boxes(text: str) -> list[Statement]:
    """Find the complete boxes that contain no other, in one pass over the braces."""
    found: list[Statement] = []
    open_braces: list[tuple[int, int]] = []  # start of the box (-1: only a brace) and of its text
    for token in _BRACES.finditer(text):
        if token["box"]:
            open_braces.append((token.start(), token.end()))
        elif token[0] == "{":
            open_braces.append((-1, token.end()))
        elif token[0] == "}" and open_braces:
            start, content = open_braces.pop()
            if start >= 0 and not (found and found[-1].start > start):
                found.append(Statement(start, text[content : token.start()]))
    return found


def _answer_lines(text: str, boxes: list[Statement]) -> tuple[list[Statement], int]:
    """Find what the answer lines state, and where the last of them ends (-1: there is none)."""
    found: list[Statement] = []
    end, place = -1, 0
    for line in _ANSWER_LINE.finditer(text):
        while place < len(boxes) and boxes[place].start < line.start():
            place += 1
        first = place
        while place < len(boxes) and boxes[place].start < line.end():
            place += 1
        of_line = boxes[first:place] or [Statement(line.start(), bare(line["answer"]))]
        stated = [statement for statement in of_line if statement.text]
        end = line.end() if stated else end
        found += stated
    return found, end


def _numbers(text: str) -> list[str]:
    return _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))


def _texts(statements: list[Statement]) -> list[str]:
    return [statement.text for statement in statements]
