"""What is known of the samples of all open groups, in columns."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from april_rl.types import Completion, Parts, Prompt, Sample, Score

NOBODY = -1  # the home of a sample that no engine has had
NO_VERSION = -1  # of a group without tokens
_NONE = -1  # no place, or no prompt


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
        self.context_versions = array("q")  # of the last ones: the oldest policy in their cache
        self.homes = array("i")  # engine that has it, or had it last; NOBODY
        self.work = array("d")  # tokens its engine has to compute; 0: none has it
        self.is_finished = bytearray()  # 0 while it needs tokens
        self.completions: list[tuple[Completion, ...]] = []  # in order, but one that ends a sample
        self.parts: list[tuple[Sequence[int], ...]] = []  # token ids of each, as engines are told
        self.finished: list[Sample | None] = []
        self.is_scored = bytearray()
        self.rewards = array("d")  # of the scored ones; nan: there is none
        self.parts_of_rewards: list[Parts] = []  # what each reward function gave, if several
        # Of groups [places].
        self.prompts: list[Prompt | None] = []  # None: the place is free
        self.prompt_ids = array("q")
        self.prompt_token_ids: list[tuple[int, ...]] = []
        self.prompt_tokens = array("i")
        self.oldest_versions = array("q")  # of the group's oldest token; NO_VERSION
        self.failures: dict[int, Score] = {}  # by place: why the group cannot be trained
        # What a group's rows of a column are when it is opened.
        size = group_size
        self._empty: list[tuple[Any, Any]] = [
            (self.lengths, array("i", [0]) * size),
            (self.context_versions, array("q", [NO_VERSION]) * size),
            (self.homes, array("i", [NOBODY]) * size),
            (self.work, array("d", [0.0]) * size),
            (self.is_finished, bytes(size)),
            (self.completions, [()] * size),
            (self.parts, [()] * size),
            (self.finished, [None] * size),
            (self.is_scored, bytes(size)),
            (self.rewards, array("d", [0.0]) * size),
            (self.parts_of_rewards, [()] * size),
        ]
        # By prompt id, from that of `_first_id` on, the place; _NONE of what is open no more.
        self._places, self._first_id = array("q"), 0
        self._free = [self._new_place()]  # places; one from the first, so that no column is empty

    def open(self, prompt: Prompt) -> int:
        """The place of a new group, all its samples empty, and no engine has one. Its prompt is
        younger than all before it.
        """
        place = self._free.pop() if self._free else self._new_place()
        self.prompts[place] = prompt
        self.prompt_ids[place] = prompt.id
        self.prompt_token_ids[place] = prompt.token_ids
        self.prompt_tokens[place] = len(prompt.token_ids)
        new = prompt.id - self._first_id - len(self._places)
        assert new >= 0, prompt.id
        if self._places:
            self._places.extend([_NONE] * new)
        else:
            self._first_id = prompt.id
        self._places.append(place)
        return place

    def close(self, places: Sequence[int]) -> None:
        """The groups there are open no more, and their places are free."""
        size, prompt_ids = self.group_size, view(self.prompt_ids)
        assert (prompt_ids[places] != _NONE).all(), places
        view(self._places)[prompt_ids[places] - self._first_id] = _NONE
        prompt_ids[places], view(self.oldest_versions)[places] = _NONE, NO_VERSION
        for column, empty in self._empty:
            if isinstance(column, list):
                for place in places:
                    column[place * size : (place + 1) * size] = empty
            else:
                view(column).reshape(-1, size)[places] = empty[0]
        for place in places:
            self.prompts[place], self.prompt_token_ids[place] = None, ()
            self.failures.pop(place, None)
        self._free += places

    def _new_place(self) -> int:
        """One behind the others, empty."""
        for column, empty in self._empty:
            column.extend(empty)
        self.prompts.append(None)
        self.prompt_ids.append(_NONE)
        self.prompt_token_ids.append(())
        self.prompt_tokens.append(0)
        self.oldest_versions.append(NO_VERSION)
        return len(self.prompts) - 1

    def finish(self, rows: NDArray[np.int64], completions: Sequence[Completion]) -> list[Sample]:
        """The samples in these rows end with these completions."""
        size = self.group_size
        places = rows // size
        view(self.is_finished)[rows] = True
        prompts, parts = self.prompts, self.completions
        flat, indices = rows.tolist(), (rows - size * places).tolist()
        samples = [
            Sample(prompts[place], index, (*parts[row], last))
            for place, index, row, last in zip(
                places.tolist(), indices, flat, completions, strict=True
            )
        ]
        for row, sample in zip(flat, samples, strict=True):
            self.finished[row] = sample
        return samples

    def note(self, rows: NDArray[np.int64], rewards: NDArray[np.float64]) -> list[int]:
        """Finished samples have their rewards; returns the places of the groups of which by that
        all are finished and have theirs, each once.
        """
        view(self.rewards)[rows], view(self.is_scored)[rows] = rewards, True
        places = rows // self.group_size
        is_whole = self.of_groups(self.is_scored, places).min(axis=1)
        is_whole &= self.of_groups(self.is_finished, places).min(axis=1)
        return list(dict.fromkeys(places[is_whole].tolist()))

    def of_groups(
        self, column: array[Any] | bytearray, places: Sequence[int] | NDArray[np.int64]
    ) -> NDArray[Any]:
        """What a column has for the samples of these groups [n, G]."""
        by_group: NDArray[Any] = view(column).reshape(-1, self.group_size)
        return by_group[places]

    def in_line(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers that rise from an older prompt's samples to a younger one's, and within a group
        by index [n].
        """
        ages = view(self.prompt_ids)[rows // self.group_size] - self._first_id
        return ages * self.group_size + rows % self.group_size

    def by_group(self, rows: NDArray[np.int64]) -> list[list[int]]:
        """Rows, in their order, with a list for those in line that are of one group."""
        flat, places = rows.tolist(), rows // self.group_size
        ends = 1 + np.flatnonzero(places[1:] != places[:-1])
        bounds = [0, *ends.tolist(), len(flat)] if flat else []
        return [flat[start:end] for start, end in pairwise(bounds)]

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

    def places(self, prompt_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of the groups of these prompts [n]; below 0 where there is none."""
        if not self._places:
            return np.full(prompt_ids.shape, _NONE)
        offsets = prompt_ids - self._first_id
        is_known = (offsets >= 0) & (offsets < len(self._places))
        return np.where(is_known, view(self._places)[np.where(is_known, offsets, 0)], _NONE)

    def open_places(self) -> NDArray[np.int64]:
        """Of all groups, the oldest prompt first."""
        places: NDArray[np.int64] = view(self._places)
        is_open: NDArray[np.bool_] = places != _NONE
        return places[is_open]

    def forget_closed(self) -> None:
        """Keep nothing of the prompts before the oldest whose group is open."""
        open_ = np.flatnonzero(view(self._places) != _NONE)
        gone = int(open_[0]) if len(open_) else len(self._places)
        del self._places[:gone]
        self._first_id += gone

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
    order, places = np.argsort(numbers, kind="stable"), np.arange(len(numbers))
    ordered = numbers[order]
    is_first = np.ones(len(numbers), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    rank = np.empty(len(numbers), np.int64)
    rank[order] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    return rank
