"""Finds the answer of a response: in a box, on an `Answer:` line, or the last number.

Every pattern takes time linear in the length of the response, for every response.
"""

from __future__ import annotations

import re
from typing import NamedTuple

THINK_START, THINK_END = "<think>", "</think>"

# The start of a box, a box without braces, an escaped character (maybe a brace), or a brace.
_BRACES = re.compile(
    r"(?P<box>\\{1,2}(?:boxed|fbox)\s*\{)"
    r"|\\{1,2}(?:boxed|fbox)\s*(?P<bare>[+-]?\d+(?:\.\d+)?(?:/\d+)?|[A-Z](?![A-Za-z]))"
    r"|\\.|[{}]",
    re.DOTALL,
)
# Commands that show nothing by themselves, and what counts as content.
_EMPTY_COMMAND = re.compile(
    r"\\(?:text\w*|math\w+|[lc]?dots|square|q?quad|boxed|Box)(?![A-Za-z])|[…□？]"
)
_SOMETHING = re.compile(r"[^\W_]+|\\[A-Za-z]+|\\[{}]|[^\x00-\x7f]")
_PLACEHOLDER = frozenset(
    (
        *("a", "answer", "expression", "final", "goes", "here", "insert", "my", "number", "put"),
        *("result", "solution", "the", "value", "write", "your"),
    )
)
# "Answer:" at the beginning of a line in any case, or inside a line with a capital letter.
_ANSWER = re.compile(
    r"(?:(?P<begins>^(?i:[ \t>*_#`-]*(?:the[ \t]+)?(?:final[ \t]+)?answer))"
    r"|\b(?:[Tt]he[ \t]+)?(?:[Ff]inal[ \t]+)?A(?:nswer|NSWER))"
    r"[ \t*_`]*[:\N{FULLWIDTH COLON}]",
    re.MULTILINE,
)
# What precedes an "Answer:" that is only mentioned: a quotation mark, or a word that it continues.
_MENTION = re.compile(r"(?:[\"'`\u2018\u201c\u00ab]|(?P<word>[^\W\d_]+))[ \t*_]*$")
_MENTION_CHARS = 32
_CONNECTIVES = frozenset(("and", "hence", "or", "so", "then", "therefore", "thus"))
# What may stand before the answer: markup, line ends, the bracket of a displayed formula.
_LEAD = re.compile(r"(?:[\s*_`$]|\\\[(?=[ \t]*\n))*")
_NUMBER = re.compile(
    r"(?:(?<![\w).])-)?"
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    r"(?:[eE][+-]?\d+)?(?:/\d+)?"
)
_SPACES = re.compile(r"\s+|\\[,;:! ]|\\(?:left|right)(?![a-zA-Z])|[$~]")
_FRACTION = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
# A sentence on an answer line ("The sum is 34. I hope it is correct.") and what it says.
_SENTENCE = re.compile(r"[A-Za-z].*\s(?:is|are):?\s+(?P<said>\S.*)", re.DOTALL)
_HOPE = re.compile(r"I hope (?:it|this) is correct\b.*", re.DOTALL)
# Prose with one formula, and words that change what the formula says.
_PROSE = re.compile(
    r"(?P<before>(?:[A-Z][^$\\]*[\s:])?)"
    r"(?P<formula>\$\$[^$]+\$\$|\$[^$\n]+\$|\\\([^\n]+?\\\)|\\\[.+?\\\])(?P<after>\s+is\b[^$\\\d]*)?\.?",
    re.DOTALL,
)
_CHANGES = re.compile(
    r"\b(?:not|no|never|neither|least|most|about|approximately|around|nearly|almost|more|less|than|"
    r"or|and|either|between|if|unless|except|wrong|false|incorrect)\b|n't\b",
    re.IGNORECASE,
)
_NEXT_TURN = re.compile(r"<\|\w+\|>\w*\s*$")  # a marker of a template between two turns
# Boxes in a data set's answer that belong together: the characters between them, and separators.
_CLOSE, _NEAR = 10, 80
_BETWEEN = re.compile(r"[,;]|\b(?:and|or)\b")
# Matches emphasis, but not 10**6.
_EMPHASIS = re.compile(r"(?<![\w)}\]])\*\*|\*\*(?![\w({\\])|(?<!\\)\$")
_MARKUP = " \t\r\n*_`$"


class Statement(NamedTuple):
    """An answer that a response states, and its position."""

    start: int  # position in the searched text
    text: str


def extract_answer(response: str, how: str) -> str | None:
    """Return the answer of a response as text; None when there is none.

    `how` is boxed, answer_line, last_number or auto, as in `reward.extract`. Of several answers the
    last one counts; `stated_answers` returns all of them.
    """
    found = stated_answers(response, how)
    return found[-1] if found else None


def stated_answers(response: str, how: str) -> list[str]:
    """Return every answer that a response states in the form `how`, in order.

    Only the text after the last `</think>` is read; a response that does not close its `<think>`
    has no answer.

    `boxed`: the content of each complete \\boxed{...}, of nested boxes the innermost.
    `answer_line`: what follows each `Answer:`, or the boxes in it. If the last one begins a line,
    statements within a line do not count, and one that is only mentioned (in quotation marks, or as
    in "my Answer:") counts if there is no other. `auto`: as answer_line when an answer line comes
    last, else as boxed; a box counts before a mentioned `Answer:`, too. `last_number`: only the
    last number, since the numbers before it are working.
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
    """Return the text after the last `</think>`, or all of it; None when thinking has not ended."""
    text = response.rpartition(THINK_END)[2]
    return None if THINK_START in text else text


def opens_thinking(prompt: str) -> bool:
    """Return whether a prompt ends inside thoughts: its chat template has written `<think>`."""
    return prompt.rstrip().endswith(THINK_START)


def with_thinking(prompt: str, response: str) -> str:
    """Return a response with the `<think>` that its prompt has written, if it is not closed."""
    is_open = opens_thinking(prompt) and THINK_END not in response
    return f"{THINK_START}{response}" if is_open else response


def gold_answer(answer: str) -> str:
    """Return the answer of a data row as text to compare with, without box, `$` and markup.

    Several boxes in one line, such as `$\\boxed{2}$ or $\\boxed{5}$`, are a list; in a longer text
    with other boxes, the last ones count.
    """
    boxes = _boxes(answer)
    if not boxes:
        return bare(answer)
    first = len(boxes) - 1
    while first and _is_near(answer, boxes[first - 1], boxes[first]):
        first -= 1
    return ", ".join(dict.fromkeys(box.text.strip() for box in boxes[first:]))


def _is_near(text: str, box: Statement, following: Statement) -> bool:
    end = text.index(box.text, box.start) + len(box.text)
    between = text[end : following.start]
    is_listed = _BETWEEN.search(between) is not None and "\n" not in between.strip()
    return len(between) <= _CLOSE or (is_listed and len(between) <= _NEAR)


def states_nothing(text: str) -> bool:
    """Return whether a box or a line only repeats the instruction: `...`, `?`, `your answer`."""
    found = _SOMETHING.findall(_EMPTY_COMMAND.sub(" ", text))
    words = {word.lower() for word in found}
    return not words or ("answer" in words and words <= _PLACEHOLDER)


def what_it_says(text: str) -> str:
    """Return what a sentence states: 34 of "The sum is 34." or "We find that $34$."; else all."""
    text = _HOPE.sub("", text).strip()
    found = _PROSE.fullmatch(text)
    if found and not _CHANGES.search(found["before"] + (found["after"] or "")):
        return found["formula"]
    sentence = _SENTENCE.fullmatch(text)
    return sentence["said"] if sentence else text


def bare(text: str) -> str:
    """Return a text without markdown, dollar signs, math delimiters and the period at its end."""
    text = _EMPHASIS.sub("", _NEXT_TURN.sub("", text)).strip(_MARKUP)
    # A closing brace of a box or a \\text around it.
    if text.endswith("}") and text.count("}") > text.count("{"):
        text = text[:-1].strip(_MARKUP)
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].strip(_MARKUP)
    if text[:2] + text[-2:] in (r"\(\)", r"\[\]"):
        text = text[2:-2].strip(_MARKUP)
    return text


def normalise(answer: str) -> str:
    """Return an answer without what never changes its meaning: spaces, `$`, the size of fractions
    and brackets, commas between thousands, a period at the end.
    """
    text = _SPACES.sub("", bare(answer))
    return _THOUSANDS.sub("", _FRACTION.sub(r"\\frac", text))


def _boxes(text: str) -> list[Statement]:
    found: list[Statement] = []
    open_braces: list[tuple[int, int]] = []  # start of the box (-1: a plain brace) and of its text
    for token in _BRACES.finditer(text):
        if token["box"]:
            open_braces.append((token.start(), token.end()))
        elif token["bare"]:
            found.append(Statement(token.start(), token["bare"]))
        elif token[0] == "{":
            open_braces.append((-1, token.end()))
        elif token[0] == "}" and open_braces:
            start, content = open_braces.pop()
            if start >= 0 and not (found and found[-1].start > start):
                found.append(Statement(start, text[content : token.start()]))
    return [box for box in found if not states_nothing(box.text)]


def _answer_lines(text: str, boxes: list[Statement]) -> tuple[list[Statement], int]:
    """Return what `Answer:` states, and where the last such statement ends (-1: there is none, or
    only mentioned ones).

    If the last one begins its line, statements within lines are working or quotations, and only
    statements that begin a line count.
    """
    every_mark = list(_ANSWER.finditer(text))
    marks = [mark for mark in every_mark if not _is_mentioned(text, mark)]
    is_mentioned_only = not marks
    marks = marks or every_mark
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    # Whether it begins a line, its end, its statements.
    found: list[tuple[bool, int, list[Statement]]] = []
    index = 0
    for mark, limit in zip(marks, ends, strict=False):
        start, end = _after(text, mark.end(), limit)
        while index < len(boxes) and boxes[index].start < mark.start():
            index += 1
        first = index
        while index < len(boxes) and boxes[index].start < end:
            index += 1
        line = bare(what_it_says(text[start:end]))
        of_line = boxes[first:index] or [Statement(mark.start(), line)]
        stated = [statement for statement in of_line if not states_nothing(statement.text)]
        if stated:
            found.append((mark["begins"] is not None, end, stated))
    if not found:
        return [], -1
    needs_beginning, end, _ = found[-1]
    counted = [stated for begins, _, stated in found if begins or not needs_beginning]
    stated_last = -1 if is_mentioned_only else end
    return [statement for stated in counted for statement in stated], stated_last


def _is_mentioned(text: str, mark: re.Match[str]) -> bool:
    """Return whether an `Answer:` within a line is quoted, or part of a phrase ("my Answer:")."""
    if mark["begins"] is not None:
        return False
    found = _MENTION.search(text[max(0, mark.start() - _MENTION_CHARS) : mark.start()])
    return found is not None and (found["word"] or "").lower() not in _CONNECTIVES


def _after(text: str, start: int, limit: int) -> tuple[int, int]:
    """Return where the answer after a colon begins and ends: the first line with content."""
    lead = _LEAD.match(text, start, limit)
    start = lead.end() if lead else start
    end = text.find("\n", start, limit)
    return start, limit if end < 0 else end


def _numbers(text: str) -> list[str]:
    return _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))


def _texts(statements: list[Statement]) -> list[str]:
    return [statement.text for statement in statements]
