"""What is known of the samples of all open groups, in columns."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from april_rl.types import Completion, Prompt, Sample, Score

NOBODY = -1  # the home of a sample that no engine has had
NO_VERSION = -1  # of a group without tokens


class SampleTable:
    """A row for each sample, G rows in line for each group, at a *place* that is free again when
    the group is open no more.

    Columns instead of objects: with hundreds of engines there are hundreds of thousands of samples.
    What happens to all of them at once, as when a step begins or an abort gives them back, numpy
    does to whole columns, and a column stays in the processor's cache where objects do not.
    """

    def __init__(self, group_size: int) -> None:
        """No groups, of `group_size` = G samples each."""
        self.group_size = group_size
        # Of samples [rows].
        self.lengths = array("i")  # response tokens so far
        self.homes = array("i")  # engine that has it, or had it last; NOBODY
        self.work = array("d")  # tokens its engine has to compute; 0: none has it
        self.is_finished = bytearray()  # 0 while it needs tokens
        self.completions: list[tuple[Completion, ...]] = []  # in order, of an unfinished one
        self.parts: list[tuple[Sequence[int], ...]] = []  # their token ids, as engines are told
        self.finished: list[Sample | None] = []
        self.scores: list[Score | None] = []
        # Of groups [places].
        self.prompts: list[Prompt | None] = []  # None: the place is free
        self.prompt_ids = array("q")
        self.prompt_tokens = array("i")
        self.oldest_versions = array("q")  # of the group's oldest token; NO_VERSION
        self.num_unfinished = array("i")  # samples
        self.num_unscored = array("i")  # samples
        self.failures: dict[int, Score] = {}  # by place: why the group cannot be trained
        # What a group's rows of a column are when it is opened; the first ones stay so unless a
        # sample is unfinished.
        size = group_size
        self._empty_when_finished: list[tuple[Any, Any]] = [
            (self.work, array("d", [0.0]) * size),
            (self.completions, [()] * size),
            (self.parts, [()] * size),
        ]
        self._empty: list[tuple[Any, Any]] = [
            (self.lengths, array("i", [0]) * size),
            (self.homes, array("i", [NOBODY]) * size),
            (self.is_finished, bytes(size)),
            (self.finished, [None] * size),
            (self.scores, [None] * size),
        ]
        self._free = [self._new_place()]  # places; one from the first, so that no column is empty

    def open(self, prompt: Prompt) -> int:
        """The place of a new group, all its samples empty, and no engine has one."""
        place = self._free.pop() if self._free else self._new_place()
        self.prompts[place] = prompt
        self.prompt_ids[place] = prompt.id
        self.prompt_tokens[place] = len(prompt.token_ids)
        return place

    def close(self, place: int) -> None:
        """The complete group there is open no more, and its place is free."""
        size = self.group_size
        rows = slice(place * size, (place + 1) * size)
        for column, empty in self._empty:
            column[rows] = empty
        self.prompts[place] = None
        self.oldest_versions[place] = NO_VERSION
        self.num_unfinished[place] = self.num_unscored[place] = size
        self.failures.pop(place, None)
        self._free.append(place)

    def _new_place(self) -> int:
        """One behind the others, empty."""
        for column, empty in (*self._empty_when_finished, *self._empty):
            column.extend(empty)
        self.prompts.append(None)
        self.prompt_ids.append(0)
        self.prompt_tokens.append(0)
        self.oldest_versions.append(NO_VERSION)
        self.num_unfinished.append(self.group_size)
        self.num_unscored.append(self.group_size)
        return len(self.prompts) - 1

    def finish(self, row: int, completion: Completion) -> Sample:
        """The sample in that row ends with this completion, and needs no more."""
        sample = self.finished[row] = Sample(
            prompt=self.prompt(row),
            index=row % self.group_size,
            completions=(*self.completions[row], completion),
        )
        self.completions[row] = self.parts[row] = ()
        self.is_finished[row] = 1
        self.num_unfinished[row // self.group_size] -= 1
        return sample

    def note(self, row: int, score: Score) -> bool:
        """The finished sample in that row has its score; whether all of its group have one now."""
        place = row // self.group_size
        self.num_unscored[place] -= self.scores[row] is None
        self.scores[row] = score
        if not score.is_valid:
            self.failures.setdefault(place, score)
        return not (self.num_unscored[place] or self.num_unfinished[place])

    def prompt(self, row: int) -> Prompt:
        """Of the sample in that row."""
        prompt = self.prompts[row // self.group_size]
        assert prompt is not None, row
        return prompt

    def sample(self, row: int) -> Sample:
        """The one in that row as it is now."""
        return self.finished[row] or Sample(
            prompt=self.prompt(row),
            index=row % self.group_size,
            completions=self.completions[row],
        )

    def rows(self, places: ArrayLike) -> NDArray[np.int64]:
        """Of the samples of these groups, one group behind the other [places · G]."""
        first = np.asarray(places, np.int64) * self.group_size
        return (first[:, None] + np.arange(self.group_size)).ravel()


def view(column: array[Any] | bytearray) -> NDArray[Any]:
    """A column as numpy has it: the same memory, so the table cannot grow until it is let go."""
    return np.frombuffer(column, np.bool_ if isinstance(column, bytearray) else column.typecode)


def rank_within(groups: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """How many of the same number stand before each [n]."""
    numbers = np.asarray(groups)
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    first = np.searchsorted(ordered, ordered)
    rank = np.empty(len(numbers), np.int64)
    rank[order] = np.arange(len(numbers)) - first
    return rank
