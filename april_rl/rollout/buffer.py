"""The groups that are alive: unfinished or unscored ones, and ready ones waiting to be trained."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Self

import numpy as np

from april_rl.rollout.state import (
    Plain,
    restore_prompt,
    restore_sample,
    restore_score,
    save_prompt,
    save_sample,
    save_score,
)
from april_rl.types import Group, Prompt, Sample, Score, ScoredGroup


class OpenGroup:
    """A group in the making: its samples grow by completions, its scores arrive one by one."""

    def __init__(self, prompt: Prompt, group_size: int) -> None:
        """All G samples empty."""
        self.prompt = prompt
        self.samples = [Sample(prompt=prompt, index=i) for i in range(group_size)]  # [G]
        self.scores: dict[int, Score] = {}
        self.oldest_version: int | None = None  # of the group's oldest token
        self.num_tokens = 0  # response tokens of all samples
        self.num_unfinished = group_size  # samples

    @property
    def is_complete(self) -> bool:
        """Whether every sample is finished."""
        return not self.num_unfinished

    @property
    def is_scored(self) -> bool:
        """Whether every sample has its score."""
        return len(self.scores) == len(self.samples)

    @property
    def unfinished(self) -> list[Sample]:
        """The samples that still need tokens."""
        return [sample for sample in self.samples if sample.finish_reason is None]

    def failure(self) -> Score | None:
        """Why the group cannot be trained: a failed score; None when all are valid."""
        return next((score for score in self.scores.values() if not score.is_valid), None)

    def scored(self) -> ScoredGroup:
        """The group as a value, when it is complete and scored."""
        assert self.is_complete
        assert self.is_scored
        rewards = tuple(self.scores[i].value for i in range(len(self.samples)))
        return ScoredGroup(
            group=Group(prompt=self.prompt, samples=tuple(self.samples)), rewards=rewards
        )

    def save(self) -> Plain:
        """Prompt, samples, and the scores so far."""
        scores = [save_score(self.scores[index]) for index in sorted(self.scores)]
        return {**_save_group(self.prompt, self.samples), "scores": scores}

    @classmethod
    def restore(cls, state: Plain) -> Self:
        """The group that `save` was called of."""
        restored = _restore_group(state)
        group = cls(restored.prompt, len(restored.samples))
        group.samples = list(restored.samples)
        group.oldest_version = restored.oldest_version
        group.num_tokens = sum(sample.num_tokens for sample in group.samples)
        group.num_unfinished = len(group.unfinished)
        scores = (restore_score(score, prompt_id=group.prompt.id) for score in state["scores"])
        group.scores = {score.sample_id.index: score for score in scores}
        return group


class Buffer:
    """Owner of every live group. Nothing is in it twice, and nothing is trained twice."""

    def __init__(self) -> None:
        """Empty."""
        self._open: dict[int, OpenGroup] = {}
        self._ready: dict[int, tuple[int, ScoredGroup]] = {}  # with its oldest token's version
        # How many groups have their oldest token of which version; None: no token yet.
        self._open_versions: Counter[int | None] = Counter()
        self._ready_versions: Counter[int] = Counter()

    def open(self, prompt: Prompt, group_size: int) -> OpenGroup:
        """A new group."""
        assert prompt.id not in self._open, prompt.id
        assert prompt.id not in self._ready, prompt.id
        group = self._open[prompt.id] = OpenGroup(prompt, group_size)
        self._open_versions[group.oldest_version] += 1
        return group

    def group(self, prompt_id: int) -> OpenGroup | None:
        """The open group of a prompt; None when there is none."""
        return self._open.get(prompt_id)

    @property
    def has_unscored(self) -> bool:
        """Whether a complete group waits for scores."""
        return any(group.is_complete for group in self._open.values())

    def extend(self, group: OpenGroup, sample: Sample) -> Sample:
        """Have `sample`, one of `group` with a completion more, in its place; returns it."""
        group.num_tokens += sample.num_tokens - group.samples[sample.index].num_tokens
        group.num_unfinished -= sample.finish_reason is not None
        group.samples[sample.index] = sample
        if group.oldest_version is None and sample.num_tokens:
            group.oldest_version = sample.oldest_version  # later ones are not older
            self._open_versions[None] -= 1
            self._open_versions[group.oldest_version] += 1
        return sample

    def score(self, score: Score) -> OpenGroup | None:
        """Note a score; returns the group when it was the last one missing."""
        group = self._open.get(score.sample_id.prompt_id)
        if group is None:
            return None
        group.scores[score.sample_id.index] = score
        return group if group.is_scored and group.is_complete else None

    def make_ready(self, scored: ScoredGroup) -> None:
        """From open to ready."""
        prompt_id = scored.group.prompt.id
        oldest = self._open[prompt_id].oldest_version or 0
        self.remove(prompt_id)
        self._ready[prompt_id] = oldest, scored
        self._ready_versions[oldest] += 1

    def remove(self, prompt_id: int) -> None:
        """Forget an open group: it was rejected or dropped."""
        self._open_versions[self._open.pop(prompt_id).oldest_version] -= 1

    def take_ready(self, num_groups: int) -> list[ScoredGroup]:
        """Remove and return at most `num_groups` ready groups, the oldest first."""
        taken = list(self.ready_groups())[:num_groups]
        for scored in taken:
            oldest, _ = self._ready.pop(scored.group.prompt.id)
            self._ready_versions[oldest] -= 1
        return taken

    def open_groups(self) -> Iterator[OpenGroup]:
        """The open groups, the oldest prompt first."""
        return (self._open[prompt_id] for prompt_id in sorted(self._open))

    def ready_groups(self) -> Iterator[ScoredGroup]:
        """The groups that wait to be trained, the oldest first."""
        by_age = sorted(self._ready.items(), key=lambda ready: (ready[1][0], ready[0]))
        return (scored for _, (_, scored) in by_age)

    def open_versions(self, *, policy_version: int) -> Counter[int]:
        """How many open groups have their oldest token of which version; one that has no token yet
        counts for the present version.
        """
        found: Counter[int] = Counter()
        for version, count in self._open_versions.items():
            found[policy_version if version is None else version] += count
        return found

    def ready_versions(self) -> Counter[int]:
        """How many ready groups have their oldest token of which version."""
        return self._ready_versions

    def fresh_samples(self, policy_version: int, *, limit: int) -> list[Sample]:
        """At most `limit` samples that end in tokens which that version sampled on a cache of its
        own, the shortest sequences first.
        """
        groups: Iterator[OpenGroup | Group] = chain(
            self.open_groups(), (scored.group for scored in self.ready_groups())
        )
        samples: list[Sample] = []
        lengths = array("i")
        for group in groups:
            num_prompt_tokens = len(group.prompt.token_ids)
            samples += group.samples
            lengths.extend([num_prompt_tokens + sample.num_tokens for sample in group.samples])
        # There are as many as the engines hold, and of most the length is all that is looked at.
        in_order = (samples[place] for place in np.argsort(lengths, kind="stable"))
        fresh = (
            sample
            for sample in in_order
            if sample.completions and sample.completions[-1].context_version == policy_version
        )
        return list(islice(fresh, limit))

    @property
    def num_open(self) -> int:
        """Groups that are unfinished or unscored."""
        return len(self._open)

    @property
    def num_ready(self) -> int:
        """Groups that wait to be trained."""
        return len(self._ready)

    @property
    def open_tokens(self) -> int:
        """Response tokens of all open groups."""
        return sum(group.num_tokens for group in self._open.values())

    def save(self) -> Plain:
        """Every group with its prompt, tokens, log-probabilities, versions, scores or rewards."""
        ready = [
            {
                **_save_group(scored.group.prompt, scored.group.samples),
                "rewards": list(scored.rewards),
            }
            for scored in self.ready_groups()
        ]
        return {"open": [group.save() for group in self.open_groups()], "ready": ready}

    def restore(self, state: Plain) -> None:
        """Hold what was saved, and nothing else."""
        opened = [OpenGroup.restore(group) for group in state["open"]]
        self._open = {group.prompt.id: group for group in opened}
        ready = [
            ScoredGroup(group=_restore_group(group), rewards=tuple(group["rewards"]))
            for group in state["ready"]
        ]
        self._ready = {
            scored.group.prompt.id: (scored.group.oldest_version or 0, scored) for scored in ready
        }
        self._open_versions = Counter(group.oldest_version for group in opened)
        self._ready_versions = Counter(oldest for oldest, _ in self._ready.values())


def _save_group(prompt: Prompt, samples: Iterable[Sample]) -> Plain:
    return {"prompt": save_prompt(prompt), "samples": [save_sample(sample) for sample in samples]}


def _restore_group(state: Plain) -> Group:
    prompt = restore_prompt(state["prompt"])
    samples = (
        restore_sample(sample, prompt=prompt, index=index)
        for index, sample in enumerate(state["samples"])
    )
    return Group(prompt=prompt, samples=tuple(samples))
