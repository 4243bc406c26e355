"""What is known of submitted samples: who waits for siblings, what each function said, what a
sample is worth in the end.

A reward function that wants whole groups is called when the last sample of a group has come; the
others score each sample at once. The scores of a group that such a function scores become known
together, so that whoever saves the samples without a score saves whole groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from april_rl.rewards.functions import RewardFunction, chosen_for
from april_rl.rewards.jobs import Asked, Job, Verdict
from april_rl.types import Sample, SampleId, Score


@dataclass(slots=True, kw_only=True)
class Unit:
    """What is scored in one call: a sample, or a whole group."""

    places: tuple[int, ...]  # of the samples, in the order of submission [n]
    job: Job
    names: str  # of the samples, for messages


@dataclass(slots=True, kw_only=True)
class _Group:
    """Samples of a prompt that are scored together."""

    size: int
    samples: dict[int, Sample] = field(default_factory=dict)  # by place
    scores: dict[int, Score] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Open:
    """A sample without a score."""

    sample_id: SampleId
    num_missing: int  # units that have not said anything yet
    group: _Group | None
    verdicts: list[Verdict] = field(default_factory=list)


class Scorebook:
    """Owner of the samples that have no score yet, by their place in the order of submission."""

    def __init__(self, functions: tuple[RewardFunction, ...]) -> None:
        """No samples, to be scored by `functions`."""
        self._functions = functions
        self._num_submitted = 0
        self._open: dict[int, _Open] = {}
        self._groups: dict[int, _Group] = {}  # by prompt id, while samples are missing
        self._known: dict[int, Score] = {}

    @property
    def has_known(self) -> bool:
        """Whether there is a score that was not taken."""
        return bool(self._known)

    def submit(self, sample: Sample, *, group_size: int) -> list[Unit]:
        """Note a finished sample of a group of `group_size`; return what can be scored by now."""
        dataset = sample.prompt.dataset
        alone, together = (
            chosen_for(self._functions, dataset, whole_groups=whole) for whole in (False, True)
        )
        assert alone or together, f"no reward function scores the data set {dataset!r}"
        place, self._num_submitted = self._num_submitted, self._num_submitted + 1
        group = self._group_of(sample, group_size) if together else None
        num_missing = bool(alone) + bool(together)
        self._open[place] = _Open(sample_id=sample.id, num_missing=num_missing, group=group)
        units = [_unit({place: sample}, whole_group=False)] if alone else []
        if group is not None:
            group.samples[place] = sample
            if len(group.samples) >= group.size:
                units.append(_unit(group.samples, whole_group=True))
                group.size, group.samples = len(group.samples), {}
                del self._groups[sample.prompt.id]
        return units

    def settle(self, unit: Unit, verdicts: Sequence[Sequence[Verdict]]) -> list[Score]:
        """Note what a unit's functions said of its samples [n]; return the scores that are known by
        that, be it that there is none.
        """
        settled = []
        for place, of_sample in zip(unit.places, verdicts, strict=True):
            sample = self._open[place]
            sample.verdicts += of_sample
            sample.num_missing -= 1
            if not sample.num_missing:
                score = self._score(sample)
                settled.append(score)
                del self._open[place]
                self._make_known(place, score, sample.group)
        return settled

    def take(self) -> list[Score]:
        """Return the scores that have become known, in the order of submission."""
        known, self._known = self._known, {}
        return [known[place] for place in sorted(known)]

    def clear(self) -> None:
        """Forget every sample."""
        self._open.clear()
        self._groups.clear()

    def _group_of(self, sample: Sample, group_size: int) -> _Group:
        """A group has the smallest size it was submitted with: a restored one may have less to
        score.
        """
        group = self._groups.setdefault(sample.prompt.id, _Group(size=group_size))
        group.size = min(group.size, group_size)
        return group

    def _make_known(self, place: int, score: Score, group: _Group | None) -> None:
        if group is None:
            self._known[place] = score
            return
        group.scores[place] = score
        if len(group.scores) == group.size:
            self._known |= group.scores

    def _score(self, sample: _Open) -> Score:
        """The weighted sum of what the functions gave, or why there is none."""
        failed = next((v for v in sample.verdicts if not v.has_value), None)
        if failed is not None:
            assert failed.outcome != "refused"
            assert failed.outcome != "undecoded"
            return Score(sample.sample_id, math.nan, failed.outcome, failed.reason)
        by_name = {verdict.name: verdict for verdict in sample.verdicts}
        parts = [(f, by_name[f.name].value) for f in self._functions if f.name in by_name]
        gave_up = any(verdict.outcome == "soft_timeout" for verdict in sample.verdicts)
        return Score(
            sample_id=sample.sample_id,
            value=math.fsum(function.weight * value for function, value in parts),
            outcome="soft_timeout" if gave_up else "scored",
            parts=tuple((f.name, value) for f, value in parts) if len(self._functions) > 1 else (),
        )


def _unit(samples: dict[int, Sample], *, whole_group: bool) -> Unit:
    """What is scored in one call, of samples of one prompt by place."""
    places = sorted(samples, key=lambda place: samples[place].index)
    found = [samples[place] for place in places]
    prompt = found[0].prompt
    asked = Asked(
        text=prompt.text, answer=prompt.answer, dataset=prompt.dataset, columns=prompt.columns
    )
    return Unit(
        places=tuple(places),
        names=str(found[0].id) if len(found) == 1 else f"group of prompt {prompt.id}",
        job=Job(
            asked=asked,
            token_ids=tuple(sample.token_ids for sample in found),
            truncated=tuple(sample.finish_reason == "length" for sample in found),
            whole_group=whole_group,
        ),
    )
