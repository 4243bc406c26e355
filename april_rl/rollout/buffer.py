"""The groups that are alive: unfinished or unscored ones, and ready ones waiting to be trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

from april_rl.rollout.open_group import OpenGroup, lengths_of, restore_group, save_group
from april_rl.rollout.state import Plain
from april_rl.types import Completion, Prompt, Sample, Score, ScoredGroup


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

    def extend(self, group: OpenGroup, completion: Completion) -> Sample | None:
        """Have a sample of `group` grow; returns it when it is finished by that."""
        was_empty = group.oldest_version is None
        sample = group.extend(completion)
        if was_empty:
            self._open_versions[None] -= 1
            self._open_versions[group.oldest_version] += 1
        return sample

    def score(self, scores: Iterable[Score]) -> list[OpenGroup]:
        """Note scores; returns the groups whose last missing one was among them."""
        scored: dict[int, OpenGroup] = {}  # each once, also when a score comes twice
        for score in scores:
            group = self._open.get(score.sample_id.prompt_id)
            if group is None:
                continue
            group.note(score)
            if group.is_scored:
                scored[group.prompt.id] = group
        return list(scored.values())

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
        # Without the versions that no group has any more: a run has as many as steps.
        self._open_versions, self._ready_versions = +self._open_versions, +self._ready_versions
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
        ready = (s for scored in self.ready_groups() for s in scored.group.samples)
        fresh_ready = [s for s in ready if s.completions[-1].context_version == policy_version]
        fresh_ready.sort(key=_sequence_length)
        fresh_open = islice(self._fresh_open(policy_version), limit)
        return sorted([*fresh_open, *fresh_ready[:limit]], key=_sequence_length)[:limit]

    def _fresh_open(self, policy_version: int) -> Iterator[Sample]:
        """Those of open groups, one after another: there are as many samples as the engines hold,
        and of most the length is all that is looked at.
        """
        groups = list(self.open_groups())
        lengths, _ = lengths_of(groups)
        sizes = [len(group.lengths) for group in groups]
        prompts = np.repeat([len(group.prompt.token_ids) for group in groups], sizes)
        first = np.cumsum([0, *sizes])  # row of each group's first sample
        begun = np.flatnonzero(lengths)
        for row in begun[np.argsort((prompts + lengths)[begun], kind="stable")]:
            number = int(np.searchsorted(first, row, side="right")) - 1
            group, index = groups[number], int(row - first[number])
            if group.completions[index][-1].context_version == policy_version:
                yield group.sample(index)

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
        return int(lengths_of(self._open.values())[0].sum(dtype=np.int64))

    def save(self) -> Plain:
        """Every group with its prompt, tokens, log-probabilities, versions, scores or rewards."""
        ready = [
            {
                **save_group(scored.group.prompt, scored.group.samples),
                "rewards": list(scored.rewards),
            }
            for scored in self.ready_groups()
        ]
        return {"open": [group.save() for group in self.open_groups()], "ready": ready}

    def restore(self, state: Plain, *, num_engines: int) -> None:
        """Hold what was saved, and nothing else; engines beyond `num_engines` are no more."""
        opened = [OpenGroup.restore(group, num_engines=num_engines) for group in state["open"]]
        self._open = {group.prompt.id: group for group in opened}
        ready = [
            ScoredGroup(group=restore_group(group), rewards=tuple(group["rewards"]))
            for group in state["ready"]
        ]
        self._ready = {
            scored.group.prompt.id: (scored.group.oldest_version or 0, scored) for scored in ready
        }
        self._open_versions = Counter(group.oldest_version for group in opened)
        self._ready_versions = Counter(oldest for oldest, _ in self._ready.values())


def _sequence_length(sample: Sample) -> int:
    return len(sample.prompt.token_ids) + sample.num_tokens
