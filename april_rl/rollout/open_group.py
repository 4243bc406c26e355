"""A group in the making."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from april_rl.rollout.sample_table import NO_VERSION, NOBODY, SampleTable
from april_rl.rollout.state import (
    Plain,
    StateError,
    restore_prompt,
    restore_sample,
    restore_score,
    save_prompt,
    save_sample,
    save_score,
)
from april_rl.types import Group, Prompt, Sample, SampleId, Score


class OpenGroup:
    """The G samples of a prompt while they grow by completions, and their scores, as the table has
    them at `place`. A handle: it holds nothing itself, and means nothing once the group is closed.
    """

    __slots__ = ("_rows", "_table", "place")

    def __init__(self, table: SampleTable, place: int) -> None:
        """The group at that place."""
        self._table, self.place = table, place
        self._rows = slice(place * table.group_size, (place + 1) * table.group_size)

    @property
    def prompt(self) -> Prompt:
        """What the samples answer."""
        return self._table.prompt(self._rows.start)

    @property
    def rows(self) -> range:
        """Where the table has the samples [G]."""
        return range(self._rows.start, self._rows.stop)

    @property
    def samples(self) -> list[Sample]:
        """All as they are now [G]."""
        return [self._table.sample(row) for row in self.rows]

    @property
    def unscored(self) -> list[Sample]:
        """The finished ones that have no score yet."""
        table = self._table
        return [
            table.sample(row)
            for row in self.rows
            if table.is_finished[row] and not table.is_scored[row]
        ]

    @property
    def is_complete(self) -> bool:
        """Whether every sample is finished."""
        return 0 not in self._table.is_finished[self._rows]

    @property
    def failure(self) -> Score | None:
        """Why the group cannot be trained."""
        return self._table.failures.get(self.place)

    @property
    def scores(self) -> list[Score]:
        """Those that are known, by index; of several without value the first says why, and one that
        has a value counts as scored, whatever its outcome was.
        """
        found = []
        for index, row in enumerate(self.rows):
            if self._table.is_scored[row]:
                value = self._table.rewards[row]
                parts = self._table.parts_of_rewards[row]
                score = Score(SampleId(self.prompt.id, index), value, "scored", parts=parts)
                if math.isnan(value) and self.failure is not None:
                    score = self.failure._replace(sample_id=score.sample_id)
                found.append(score)
        return found

    def save(self) -> Plain:
        """Prompt, samples, which engine had each, and the scores so far."""
        homes = self._table.homes[self._rows]
        return {
            **save_group(self.prompt, self.samples),
            "homes": [None if home == NOBODY else home for home in homes],
            "scores": [save_score(score) for score in self.scores],
        }

    @classmethod
    def restore(cls, state: Plain, table: SampleTable, *, num_engines: int) -> OpenGroup:
        """The group that `save` was called of, in a table; an engine that is none of `num_engines`
        is home to nobody. Raises StateError when it has not the table's number of samples.
        """
        restored = restore_group(state)
        if len(restored.samples) != table.group_size:
            raise StateError(
                f"rollout.group_size={table.group_size}, but the saved groups have "
                f"{len(restored.samples)} samples: resume with the same"
            )
        group = cls(table, table.open(restored.prompt))
        for row, sample, home in zip(group.rows, restored.samples, state["homes"], strict=True):
            table.lengths[row] = sample.num_tokens
            table.homes[row] = home if home is not None and home < num_engines else NOBODY
            for part in sample.completions:
                table.context_versions[row] = part.context_version
                if part.finish_reason is None:
                    table.completions[row] += (part,)
                    table.parts[row] += (part.token_ids,)
                else:
                    table.finish(np.array([row]), [part])
        oldest = restored.oldest_version
        table.oldest_versions[group.place] = NO_VERSION if oldest is None else oldest
        scores = [restore_score(score, prompt_id=restored.prompt.id) for score in state["scores"]]
        for score in scores:
            if not score.is_valid:
                table.failures.setdefault(group.place, score)
        for score in scores:
            table.parts_of_rewards[group.rows[score.sample_id.index]] = score.parts
        table.note(
            np.array([group.rows[score.sample_id.index] for score in scores], np.int64),
            np.array([score.value if score.is_valid else math.nan for score in scores]),
        )
        return group


def save_group(prompt: Prompt, samples: Sequence[Sample]) -> Plain:
    """A prompt and its samples."""
    return {"prompt": save_prompt(prompt), "samples": [save_sample(sample) for sample in samples]}


def restore_group(state: Plain) -> Group:
    """What `save_group` was given."""
    prompt = restore_prompt(state["prompt"])
    samples = (
        restore_sample(sample, prompt=prompt, index=index)
        for index, sample in enumerate(state["samples"])
    )
    return Group(prompt=prompt, samples=tuple(samples))
