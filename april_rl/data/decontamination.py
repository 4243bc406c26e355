"""Find training questions that share a passage with evaluation questions, by n-grams of words.

The rule is the one of GPT-3 (Brown et al. 2020, appendix C): 13 consecutive words in common,
compared in lower case and without punctuation. A question with fewer words overlaps only if all of
it is equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

NUM_WORDS = 13
_WORD = re.compile(r"[a-z0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
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
                found.append(
                    Overlap(row=row, set_name=name, evaluation_row=evaluation_row, passage=shared)
                )
        return found


def passages(question: str) -> list[str]:
    """Return every run of NUM_WORDS consecutive words of a question; all its words if it is
    shorter.
    """
    words = _WORD.findall(question.lower())
    if not words:
        return []
    last = max(0, len(words) - NUM_WORDS)
    return [" ".join(words[start : start + NUM_WORDS]) for start in range(last + 1)]
