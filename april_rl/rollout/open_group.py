"""A group in the making."""

from __future__ import annotations

from collections.abc import Sequence

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
from april_rl.types import Group, Prompt, Sample, Score, ScoredGroup


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
    def lengths(self) -> list[int]:
        """Response tokens of each sample so far [G]."""
        return self._table.lengths[self._rows].tolist()

    @property
    def samples(self) -> list[Sample]:
        """All as they are now [G]."""
        return [self._table.sample(row) for row in self.rows]

    @property
    def unscored(self) -> list[Sample]:
        """The finished ones that have no score yet."""
        scores = self._table.scores[self._rows]
        finished = zip(self._table.finished[self._rows], scores, strict=True)
        return [sample for sample, score in finished if sample is not None and score is None]

    @property
    def is_complete(self) -> bool:
        """Whether every sample is finished."""
        return not self._table.num_unfinished[self.place]

    @property
    def is_scored(self) -> bool:
        """Whether every sample is finished and has its score."""
        return self.is_complete and not self._table.num_unscored[self.place]

    @property
    def oldest_version(self) -> int | None:
        """Of the group's oldest token; None before there is one."""
        version = self._table.oldest_versions[self.place]
        return None if version == NO_VERSION else version

    @property
    def failure(self) -> Score | None:
        """Why the group cannot be trained."""
        return self._table.failures.get(self.place)

    def scored(self) -> ScoredGroup:
        """The group as a value, when it is complete and scored."""
        assert self.is_scored
        scores, finished = self._table.scores[self._rows], self._table.finished[self._rows]
        rewards = tuple([score.value for score in scores if score is not None])
        samples = tuple([sample for sample in finished if sample is not None])
        group = Group(prompt=self.prompt, samples=samples)
        return ScoredGroup(group=group, rewards=rewards)

    def save(self) -> Plain:
        """Prompt, samples, which engine had each, and the scores so far."""
        homes = self._table.homes[self._rows]
        scores = [score for score in self._table.scores[self._rows] if score is not None]
        return {
            **save_group(self.prompt, self.samples),
            "homes": [None if home == NOBODY else home for home in homes],
            "scores": [save_score(score) for score in scores],
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
            so_far = sample.completions[:-1] if sample.is_finished else sample.completions
            table.completions[row] = so_far
            table.parts[row] = tuple([part.token_ids for part in so_far])
            if sample.is_finished:
                table.finish(row, sample.completions[-1])
        oldest = restored.oldest_version
        table.oldest_versions[group.place] = NO_VERSION if oldest is None else oldest
        for score in state["scores"]:
            table.note(
                group.rows[score["index"]], restore_score(score, prompt_id=restored.prompt.id)
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
