"""The live groups: open ones (unfinished or unscored) and ready ones."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from april_rl.rollout.open_group import OpenGroup, SampleState
from april_rl.types import Prompt, Sample, Score, ScoredGroup

_TOKEN_BYTES = 12  # int32 of the token id and float64 of its log-probability


class Buffer:
    """Every live group, by prompt id. No group is in it twice, and no group is trained twice."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self._open: dict[int, OpenGroup] = {}  # in the order they were opened: oldest prompt first
        self._ready: dict[int, ScoredGroup] = {}

    @property
    def num_open(self) -> int:
        """Return how many groups are unfinished or unscored."""
        return len(self._open)

    @property
    def num_ready(self) -> int:
        """Return how many groups wait to be trained."""
        return len(self._ready)

    @property
    def open_tokens(self) -> int:
        """Return the response tokens of all open groups."""
        return sum(sum(group.lengths) for group in self._open.values())

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the tokens and log-probabilities of all groups."""
        groups = [scored.group for scored in self._ready.values()]
        ready_tokens = sum(sample.num_tokens for group in groups for sample in group.samples)
        return _TOKEN_BYTES * (self.open_tokens + ready_tokens)

    @property
    def has_unscored(self) -> bool:
        """Return whether a complete group waits for scores."""
        return any(group.is_complete for group in self._open.values())

    def open(self, prompt: Prompt) -> OpenGroup:
        """Add a new group with empty samples."""
        assert prompt.id not in self._open, prompt.id
        assert prompt.id not in self._ready, prompt.id
        group = self._open[prompt.id] = OpenGroup(prompt, self.group_size)
        return group

    def group(self, prompt_id: int) -> OpenGroup | None:
        """Return the open group of a prompt; None when there is none."""
        return self._open.get(prompt_id)

    def open_groups(self) -> Iterator[OpenGroup]:
        """Return the open groups, oldest prompt first."""
        return iter(self._open.values())

    def ready_groups(self) -> list[ScoredGroup]:
        """Return the ready groups, oldest token first."""
        return sorted(self._ready.values(), key=_age_order)

    def score(self, scores: Iterable[Score]) -> list[OpenGroup]:
        """Record scores and return the groups that they complete; scores of groups that are not
        open any more are ignored.
        """
        scored: dict[int, OpenGroup] = {}
        for score in scores:
            group = self._open.get(score.sample_id.prompt_id)
            if group is None:
                continue
            group.score(score)
            if group.is_scored:
                scored[group.prompt.id] = group
        return list(scored.values())

    def remove(self, prompt_id: int) -> None:
        """Remove an open group."""
        del self._open[prompt_id]

    def make_ready(self, scored: ScoredGroup) -> None:
        """Turn an open group into a ready one."""
        self.remove(scored.group.prompt.id)
        self._ready[scored.group.prompt.id] = scored

    def remove_ready(self, prompt_id: int) -> None:
        """Remove a ready group."""
        del self._ready[prompt_id]

    def open_versions(self, *, policy_version: int) -> Counter[int]:
        """Count open groups by the version of their oldest token; a group without tokens counts for
        `policy_version`.
        """
        return Counter(
            policy_version if group.oldest_version is None else group.oldest_version
            for group in self._open.values()
        )

    def ready_versions(self) -> Counter[int]:
        """Count ready groups by the version of their oldest token."""
        return Counter(scored.group.oldest_version or 0 for scored in self._ready.values())

    def fresh_samples(self, policy_version: int, *, limit: int) -> list[Sample]:
        """Return at most `limit` samples, shortest sequences first, whose last tokens were sampled
        by `policy_version` on a KV cache of the same version.
        """
        fresh = [
            (len(group.prompt.token_ids) + length, prompt_id, index)
            for prompt_id, group in self._open.items()
            for index, (length, completions) in enumerate(
                zip(group.lengths, group.completions, strict=True)
            )
            if completions and completions[-1].context_version == policy_version
        ]
        opened = [
            self._open[prompt_id].sample(index)
            for _, prompt_id, index in heapq.nsmallest(limit, fresh)
        ]
        ready = [
            sample
            for scored in self.ready_groups()
            for sample in scored.group.samples
            if sample.completions[-1].context_version == policy_version
        ]
        return heapq.nsmallest(limit, [*opened, *ready], key=_sequence_length)

    def lengths(
        self, *, without: Collection[int] = ()
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the response tokens of all samples of open groups, and whether each is finished
        [n], without the prompts in `without`.
        """
        skipped = set(without)
        groups = [group for group in self._open.values() if group.prompt.id not in skipped]
        lengths = [length for group in groups for length in group.lengths]
        is_finished = [
            state is SampleState.finished or state is SampleState.scored
            for group in groups
            for state in group.states
        ]
        return np.array(lengths, np.int64), np.array(is_finished, np.bool_)

    def restore(self, opened: Iterable[OpenGroup], ready: Iterable[ScoredGroup]) -> None:
        """Fill an empty buffer with these groups."""
        assert not self._open
        assert not self._ready
        self._open = {group.prompt.id: group for group in opened}
        self._ready = {scored.group.prompt.id: scored for scored in ready}


def _age_order(scored: ScoredGroup) -> tuple[int, int]:
    return scored.group.oldest_version or 0, scored.group.prompt.id


def _sequence_length(sample: Sample) -> int:
    return len(sample.prompt.token_ids) + sample.num_tokens
