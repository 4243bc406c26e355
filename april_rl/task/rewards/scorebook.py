"""Bookkeeping of submitted samples: which samples wait for siblings, what each function returned,
and the final score.

A reward function that wants whole groups is called when the last sample of a group has been
submitted; the others score each sample at once. All scores of a group that such a function scores
become known together, so that a saved group is either scored as a whole or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import chain

from april_rl.task.rewards.functions import RewardFunction
from april_rl.task.rewards.jobs import Job, Result
from april_rl.types import Sample, Score


@dataclass(slots=True, kw_only=True)
class Unit:
    """A sample or a whole group that is scored in one call, and the attempt under way."""

    positions: tuple[int, ...]  # positions of the samples in the order of submission [n]
    job: Job
    names: str  # names the samples in messages
    attempt: int = 1
    future: Future[Result] | None = None  # result of this attempt; None while no process has it


@dataclass(slots=True, kw_only=True)
class _Group:
    """Samples of a prompt that are scored together."""

    size: int
    samples: dict[int, Sample] = field(default_factory=dict)  # by position
    scores: dict[int, Score] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _OpenSample:
    """A sample that some functions have not scored yet."""

    num_missing: int  # number of units that have not come back
    group: _Group | None
    scores: list[Score] = field(default_factory=list)  # scores of each function


class Scorebook:
    """The samples that have no score yet, by their position in the order of submission."""

    def __init__(self, functions: tuple[RewardFunction, ...]) -> None:
        self._functions = functions
        self._num_submitted = 0
        self._open: dict[int, _OpenSample] = {}
        self._groups: dict[int, _Group] = {}  # groups by prompt id while samples are missing
        self._known: dict[int, Score] = {}
        self._incomplete: set[int] = set()  # prompt ids: scored as a group, not yet all one by one

    @property
    def has_incomplete(self) -> bool:
        """Return whether a group was scored as a whole, but some of its samples not one by one."""
        return bool(self._incomplete)

    @property
    def has_known(self) -> bool:
        return bool(self._known)

    def submit(self, sample: Sample, *, group_size: int) -> list[Unit]:
        """Add a finished sample of a group of `group_size`; return what can be scored now."""
        dataset = sample.prompt.dataset
        wanted = {f.wants_group for f in self._functions if f.scores(dataset)}
        assert wanted, f"no reward function scores the data set {dataset!r}"
        position, self._num_submitted = self._num_submitted, self._num_submitted + 1
        group = self._group_of(sample, group_size) if True in wanted else None
        self._open[position] = _OpenSample(num_missing=len(wanted), group=group)
        units = [_unit({position: sample}, whole_group=False)] if False in wanted else []
        if group is not None:
            group.samples[position] = sample
            if len(group.samples) >= group.size:
                units.append(_unit(group.samples, whole_group=True))
                group.size, group.samples = len(group.samples), {}
                del self._groups[sample.prompt.id]
        return units

    def record(self, unit: Unit, scores: Sequence[Sequence[Score]]) -> list[Score]:
        """Record the scores of a unit's samples by its functions; return complete totals."""
        complete = []
        for position, of_sample in zip(unit.positions, scores, strict=True):
            sample = self._open[position]
            sample.scores += of_sample
            sample.num_missing -= 1
            if sample.num_missing:
                if unit.job.whole_group:
                    self._incomplete.add(unit.job.sample_ids[0].prompt_id)
            else:
                score = total(self._functions, sample.scores)
                complete.append(score)
                del self._open[position]
                self._make_known(position, score, sample.group)
        return complete

    def take(self) -> list[Score]:
        """Return the scores that have become known, in the order of submission."""
        known, self._known = self._known, {}
        return [known[position] for position in sorted(known)]

    def clear(self) -> None:
        """Forget every sample."""
        self._open.clear()
        self._groups.clear()

    def _group_of(self, sample: Sample, group_size: int) -> _Group:
        """Return the group of a sample; a restored group may have fewer samples to score."""
        group = self._groups.setdefault(sample.prompt.id, _Group(size=group_size))
        group.size = min(group.size, group_size)
        return group

    def _make_known(self, position: int, score: Score, group: _Group | None) -> None:
        if group is None:
            self._known[position] = score
            return
        group.scores[position] = score
        if len(group.scores) == group.size:
            self._known |= group.scores
            self._incomplete.discard(score.sample_id.prompt_id)


def total(functions: Sequence[RewardFunction], scores: Sequence[Score]) -> Score:
    """Return one score for a sample: the sum over the functions, or the first failure. `parts` is
    empty with one function.
    """
    failed = next((score for score in scores if score.value is None), None)
    if failed is not None:
        return failed
    values = dict(chain.from_iterable(score.parts for score in scores))
    parts = tuple((f.name, values[f.name]) for f in functions if f.name in values)
    gave_up = any(score.outcome == "soft_timeout" for score in scores)
    return Score(
        sample_id=scores[0].sample_id,
        value=math.fsum(score.value for score in scores if score.value is not None),
        outcome="soft_timeout" if gave_up else "scored",
        parts=parts if len(functions) > 1 else (),
    )


def _unit(samples: dict[int, Sample], *, whole_group: bool) -> Unit:
    positions = sorted(samples, key=lambda position: samples[position].index)
    found = [samples[position] for position in positions]
    prompt = found[0].prompt
    return Unit(
        positions=tuple(positions),
        names=str(found[0].id) if len(found) == 1 else f"group of prompt {prompt.id}",
        job=Job(
            prompt=replace(prompt, token_ids=()),
            sample_ids=tuple(sample.id for sample in found),
            token_ids=tuple(sample.token_ids for sample in found),
            truncated=tuple(sample.finish_reason == "length" for sample in found),
            environment_rewards=tuple(sample.environment_reward for sample in found),
            whole_group=whole_group,
        ),
    )
