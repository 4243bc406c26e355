"""The groups that are alive: unfinished or unscored ones, and ready ones waiting to be trained."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, compress
from typing import cast

import numpy as np
from numpy.typing import NDArray

from april_rl.rollout.open_group import OpenGroup, restore_group, save_group
from april_rl.rollout.returned import Returned
from april_rl.rollout.sample_table import NO_VERSION, SampleTable, view
from april_rl.rollout.state import Plain
from april_rl.types import Group, Prompt, Sample, Score, ScoredGroup


class Buffer:
    """Owner of every live group. Nothing is in it twice, and nothing is trained twice."""

    def __init__(self, group_size: int) -> None:
        """Empty; of groups of `group_size` samples."""
        self.table = SampleTable(group_size)  # of the open groups' samples
        self._num_open = 0
        self._ready: dict[int, tuple[int, ScoredGroup]] = {}  # with its oldest token's version
        # How many groups have their oldest token of which version; NO_VERSION: no token yet.
        self._open_versions: Counter[int] = Counter()
        self._ready_versions: Counter[int] = Counter()

    def open(self, prompt: Prompt) -> OpenGroup:
        """A new group, of a prompt younger than all before it."""
        self._open_versions[NO_VERSION] += 1
        self._num_open += 1
        return OpenGroup(self.table, self.table.open(prompt))

    @property
    def has_unscored(self) -> bool:
        """Whether a complete group waits for scores."""
        return any(group.is_complete for group in self.open_groups())

    def rows_of(
        self, prompt_ids: NDArray[np.int64], indices: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Of samples [n]; below 0 for those of no open group."""
        return self.table.places(prompt_ids) * self.table.group_size + indices

    def prompt_tokens(self, rows: NDArray[np.int64]) -> NDArray[np.intc]:
        """Of the prompt of each sample [n]."""
        return view(self.table.prompt_tokens)[rows // self.table.group_size]

    def unfinished(self) -> NDArray[np.int64]:
        """Rows of the unfinished samples, those of the oldest prompt first."""
        self.table.forget_closed()
        rows = self._open_rows()
        is_finished: NDArray[np.bool_] = view(self.table.is_finished)[rows]
        return rows[~is_finished]

    def extend(self, returned: Returned, *, policy_version: int) -> list[Sample]:
        """Have samples grow by what that version sampled; returns those that are finished by it."""
        table, rows = self.table, returned.rows
        view(table.lengths)[rows] += returned.num_tokens
        view(table.context_versions)[rows] = returned.context_versions
        self._date(rows[returned.num_tokens > 0] // table.group_size, policy_version)
        came = zip(rows.tolist(), returned.completions, strict=True)
        for row, completion in compress(came, (~returned.is_finished).tolist()):
            table.completions[row] += (completion,)
            table.parts[row] += (completion.token_ids,)
        ended = returned.where(returned.is_finished)
        return table.finish(ended.rows, ended.completions)

    def _date(self, places: NDArray[np.int64], policy_version: int) -> None:
        """Groups have tokens of that version, the first ones it may be."""
        versions = view(self.table.oldest_versions)
        dated = np.unique(places[versions[places] == NO_VERSION])
        versions[dated] = policy_version
        self._open_versions[NO_VERSION] -= len(dated)
        self._open_versions[policy_version] += len(dated)

    def score(self, scores: Sequence[Score]) -> list[int]:
        """Note scores; returns the places of the groups whose last missing one was among them."""
        table, (sample_ids, values, outcomes, _, parts) = self.table, zip(*scores, strict=True)
        flat = np.fromiter(chain.from_iterable(sample_ids), np.int64, 2 * len(scores))
        rows, rewards = self.rows_of(flat[::2], flat[1::2]), np.array(values, np.float64)
        unusual = [number for number, outcome in enumerate(outcomes) if outcome != "scored"]
        for number in [number for number in unusual if not scores[number].is_valid]:
            rewards[number] = math.nan
            if rows[number] >= 0:
                place = int(rows[number]) // table.group_size
                table.failures.setdefault(place, scores[number])
        for number in [number for number, of_one in enumerate(parts) if of_one]:
            if rows[number] >= 0:
                table.parts_of_rewards[int(rows[number])] = parts[number]
        is_open = rows >= 0
        return table.note(rows[is_open], rewards[is_open])

    def scored(self, places: Sequence[int]) -> list[ScoredGroup]:
        """The groups there, which are complete and scored, as values [n]."""
        table, size = self.table, self.table.group_size
        rewards = table.of_groups(table.rewards, places).tolist()
        groups = []
        for place, of_each in zip(places, rewards, strict=True):
            samples = table.finished[place * size : (place + 1) * size]
            prompt = table.prompts[place]
            assert prompt is not None
            assert all(samples), prompt.id
            group = Group(prompt=prompt, samples=cast("tuple[Sample, ...]", (*samples,)))
            parts = table.parts_of_rewards[place * size : (place + 1) * size]
            groups.append(
                ScoredGroup(group=group, rewards=(*of_each,), parts=(*parts,) if any(parts) else ())
            )
        return groups

    def make_ready(self, scored: ScoredGroup, *, oldest_version: int) -> None:
        """Have a group wait to be trained, that is removed from the open ones."""
        self._ready[scored.group.prompt.id] = oldest_version, scored
        self._ready_versions[oldest_version] += 1

    def remove(self, places: Sequence[int]) -> None:
        """Forget the open groups there."""
        for version in view(self.table.oldest_versions)[places].tolist():
            self._open_versions[version] -= 1
        self.table.close(places)
        self._num_open -= len(places)

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
        return (OpenGroup(self.table, place) for place in self.table.open_places().tolist())

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
            found[policy_version if version == NO_VERSION else version] += count
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
        fresh_open = self._fresh_open(policy_version, limit=limit)
        return sorted([*fresh_open, *fresh_ready[:limit]], key=_sequence_length)[:limit]

    def _fresh_open(self, policy_version: int, *, limit: int) -> list[Sample]:
        """Those of open groups, of equal ones the first."""
        table, rows = self.table, self._open_rows()
        is_fresh = view(table.context_versions)[rows] == policy_version
        rows = rows[is_fresh & (view(table.lengths)[rows] > 0)]
        lengths = np.add(self.prompt_tokens(rows), view(table.lengths)[rows], dtype=np.int64)
        rank = lengths * len(rows) + np.arange(len(rows))
        shortest = np.argpartition(rank, limit)[:limit] if len(rows) > limit else slice(None)
        order = np.argsort(rank[shortest])
        return [table.sample(row) for row in rows[shortest][order].tolist()]

    def lengths(
        self, *, without: Collection[int] = ()
    ) -> tuple[NDArray[np.intc], NDArray[np.bool_]]:
        """Response tokens of all samples of open groups but those `without` [n], and whether those
        are finished.
        """
        rows = self._open_rows(without=without)
        return view(self.table.lengths)[rows], view(self.table.is_finished)[rows]

    def _open_rows(self, *, without: Collection[int] = ()) -> NDArray[np.int64]:
        """Of all samples of open groups, those of the oldest prompt first."""
        places = self.table.open_places()
        if without:
            places = places[~np.isin(places, self.table.places(np.array([*without])))]
        return self.table.rows(places)

    @property
    def num_open(self) -> int:
        """Groups that are unfinished or unscored."""
        return self._num_open

    @property
    def num_ready(self) -> int:
        """Groups that wait to be trained."""
        return len(self._ready)

    @property
    def open_tokens(self) -> int:
        """Response tokens of all open groups."""
        return int(self.lengths()[0].sum(dtype=np.int64))

    def save(self) -> Plain:
        """Every group with its prompt, tokens, log-probabilities, versions, scores or rewards."""
        ready = [
            {
                **save_group(scored.group.prompt, scored.group.samples),
                "rewards": list(scored.rewards),
                "parts": [dict(parts) for parts in scored.parts],
            }
            for scored in self.ready_groups()
        ]
        return {"open": [group.save() for group in self.open_groups()], "ready": ready}

    def restore(self, state: Plain, *, num_engines: int) -> None:
        """Hold what was saved, when empty; engines beyond `num_engines` are no more."""
        assert not self._num_open
        assert not self._ready
        for group in state["open"]:
            OpenGroup.restore(group, self.table, num_engines=num_engines)
        self._num_open = len(state["open"])
        ready = [
            ScoredGroup(
                group=restore_group(group),
                rewards=tuple(group["rewards"]),
                parts=tuple(tuple(parts.items()) for parts in group["parts"]),
            )
            for group in state["ready"]
        ]
        self._ready = {
            scored.group.prompt.id: (scored.group.oldest_version or 0, scored) for scored in ready
        }
        versions = view(self.table.oldest_versions)[self.table.open_places()]
        self._open_versions = Counter(versions.tolist())
        self._ready_versions = Counter(oldest for oldest, _ in self._ready.values())


def _sequence_length(sample: Sample) -> int:
    return len(sample.prompt.token_ids) + sample.num_tokens
