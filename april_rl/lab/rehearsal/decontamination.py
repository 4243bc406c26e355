"""Find training questions that share a passage with evaluation questions, by n-grams of words.

The rule is the one of GPT-3 (Brown et al. 2020, appendix C): 13 consecutive words in common,
compared in lower case and without punctuation. Scripts without spaces between words (Chinese,
Japanese, Thai) are compared by characters, of which two count as a word. A question with fewer
words overlaps only if all of it is equal, and one with fewer than four words never does: the same
"2 + 3" in two sets is not a leak.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from unicodedata import category, normalize

NUM_WORDS, FEWEST_WORDS = 13, 4
# Thai to Myanmar, Khmer, kana, bopomofo, Chinese characters.
_CHARACTERS = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u31bf\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U00020000-\U0003ffff"
)
_CHARACTERS_OF_A_WORD = 2
_MARKS = "".join(  # vowel signs and accents, which are no letters for \w
    chr(code) for code in range(0x300, 0x10000) if category(chr(code)) in ("Mn", "Mc")
)
_WORD = re.compile(rf"[{_CHARACTERS}]|(?:(?![{_CHARACTERS}])[^\W_]|[{_MARKS}])+")
_CHARACTER = re.compile(f"[{_CHARACTERS}]")


class Overlap(NamedTuple):
    """A training question and the first evaluation question that shares a passage with it."""

    row: int  # index in the training questions
    set_name: str
    evaluation_row: int
    passage: str  # the shared words, normalized


class Passages:
    """An index of every passage in some evaluation sets."""

    def __init__(self, sets: Mapping[str, Sequence[str]]) -> None:
        """`sets` maps the name of each evaluation set to its questions."""
        self._where: dict[str, tuple[str, int]] = {}
        for name, questions in sets.items():
            for row, question in enumerate(questions):
                for passage in passages(question):
                    self._where.setdefault(passage, (name, row))

    def overlaps(self, questions: Iterable[str]) -> list[Overlap]:
        """Return the questions that share a passage with an evaluation question, in the order
        given.
        """
        found = []
        for row, question in enumerate(questions):
            shared = next((p for p in passages(question) if p in self._where), None)
            if shared is not None:
                name, evaluation_row = self._where[shared]
                found.append(Overlap(row, name, evaluation_row, shared))
        return found


def passages(question: str) -> list[str]:
    """Return the shortest run of consecutive words from each word on that is as long as NUM_WORDS;
    all words of a question that is shorter, and nothing if it is shorter than FEWEST_WORDS.
    """
    words = _WORD.findall(normalize("NFKC", question).casefold())
    lengths = [1 if _CHARACTER.match(word) else _CHARACTERS_OF_A_WORD for word in words]
    if sum(lengths) < FEWEST_WORDS * _CHARACTERS_OF_A_WORD:
        return []
    found, end, length = [], 0, 0
    for start, first in enumerate(lengths):
        while end < len(words) and length < NUM_WORDS * _CHARACTERS_OF_A_WORD:
            length += lengths[end]
            end += 1
        if length < NUM_WORDS * _CHARACTERS_OF_A_WORD and start:
            break
        found.append(" ".join(words[start:end]))
        length -= first
    return found
