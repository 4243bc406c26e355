"""Training questions that an evaluation set has too are found, and no others."""

from __future__ import annotations

import pytest

from april_rl.data.decontamination import NUM_WORDS, Passages, passages

LONG = (
    "Every morning a baker sells nine loaves of bread for four dollars each and keeps two for home"
)


def found(training: list[str], **evaluation: list[str]) -> list[tuple[int, str, int]]:
    overlaps = Passages(evaluation).overlaps(training)
    return [(overlap.row, overlap.set_name, overlap.evaluation_row) for overlap in overlaps]


def test_a_passage_of_thirteen_words_is_found_whatever_stands_around_it() -> None:
    words = LONG.split()
    shared = " ".join(words[2 : 2 + NUM_WORDS])
    training = ["What is 2 + 3?", f"Problem 7. {shared.upper()}, right? Say why."]
    assert found(training, aime=["Name a prime.", LONG]) == [(1, "aime", 1)]


def test_twelve_words_in_common_are_no_overlap() -> None:
    words = LONG.split()
    shared = " ".join(words[2 : 1 + NUM_WORDS])
    assert found([f"But here {shared} differs after that and goes on"], aime=[LONG]) == []


def test_a_short_question_overlaps_only_where_it_is_the_same() -> None:
    assert found(["What is $2+3$?", "What is 2+3 then?"], test=["what is 2 + 3"]) == [
        (0, "test", 0)
    ]


@pytest.mark.parametrize("text", ["", "...", "?!"])
def test_a_question_without_words_overlaps_with_nothing(text: str) -> None:
    assert passages(text) == []
    assert found([text], test=[text]) == []
