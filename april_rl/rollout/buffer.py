"""The groups that are alive: unfinished or unscored ones, and ready ones waiting to be trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from april_rl.rollout.open_group import OpenGroup, restore_group, save_group
from april_rl.rollout.returned import Returned
from april_rl.rollout.sample_table import NO_VERSION, SampleTable, view
from april_rl.rollout.state import Plain
from april_rl.ticks import Completions
from april_rl.types import Prompt, Sample, Score, ScoredGroup


class Buffer:
    """Owner of every live group. Nothing is in it twice, and nothing is trained twice."""

    def __init__(self, group_size: int) -> None:
        """Empty; of groups of `group_size` samples."""
        self.table = SampleTable(group_size)  # of the open groups' samples
        self._open: dict[int, OpenGroup] = {}
        self._first: dict[int, int] = {}  # row of an open group's first sample
        self._ready: dict[int, tuple[int, ScoredGroup]] = {}  # with its oldest token's version
        # How many groups have their oldest token of which version; NO_VERSION: no token yet.
        self._open_versions: Counter[int] = Counter()
        self._ready_versions: Counter[int] = Counter()

    def open(self, prompt: Prompt) -> OpenGroup:
        """A new group."""
        assert prompt.id not in self._open, prompt.id
        assert prompt.id not in self._ready, prompt.id
        self._open_versions[NO_VERSION] += 1
        return self._add(OpenGroup(self.table, self.table.open(prompt)))

    def _add(self, group: OpenGroup) -> OpenGroup:
        self._open[group.prompt.id] = group
        self._first[group.prompt.id] = group.rows.start
        return group

    def group(self, prompt_id: int) -> OpenGroup | None:
        """The open group of a prompt; None when there is none."""
        return self._open.get(prompt_id)

    @property
    def has_unscored(self) -> bool:
        """Whether a complete group waits for scores."""
        return any(group.is_complete for group in self._open.values())

    def rows_of(self, completions: Completions) -> NDArray[np.int64]:
        """Of the samples they belong to [n]; below 0 for those of no open group."""
        first, none = self._first, -self.table.group_size
        columns = completions.columns
        found = [first.get(prompt_id, none) for prompt_id in columns.prompt_id.tolist()]
        return np.array(found, np.int64) + columns.index

    def prompt_tokens(self, rows: NDArray[np.int64]) -> NDArray[np.intc]:
        """Of the prompt of each sample [n]."""
        return view(self.table.prompt_tokens)[rows // self.table.group_size]

    def unfinished(self) -> NDArray[np.int64]:
        """Rows of the unfinished samples, those of the oldest prompt first."""
        rows = self._open_rows()
        is_finished: NDArray[np.bool_] = view(self.table.is_finished)[rows]
        return rows[~is_finished]

    def extend(self, returned: Returned, *, policy_version: int) -> list[Sample]:
        """Have samples grow by what that version sampled; returns those that are finished by it."""
        table, rows = self.table, returned.rows
        view(table.lengths)[rows] += returned.num_tokens
        places = np.unique(rows[returned.num_tokens > 0] // table.group_size)
        versions = view(table.oldest_versions)
        dated = places[versions[places] == NO_VERSION]
        versions[dated] = policy_version
        self._open_versions[NO_VERSION] -= len(dated)
        self._open_versions[policy_version] += len(dated)
        ended: list[Sample] = []
        came = zip(rows.tolist(), returned.completions, returned.is_finished.tolist(), strict=True)
        for row, completion, is_finished in came:
            if is_finished:
                ended.append(table.finish(row, completion))
            else:
                table.completions[row] += (completion,)
                table.parts[row] += (completion.token_ids,)
        return ended

    def score(self, scores: Iterable[Score]) -> list[OpenGroup]:
        """Note scores; returns the groups whose last missing one was among them."""
        scored: dict[int, OpenGroup] = {}  # each once, also when a score comes twice
        first, table = self._first, self.table
        for score in scores:
            prompt_id, index = score.sample_id
            if prompt_id in first and table.note(first[prompt_id] + index, score):
                scored[prompt_id] = self._open[prompt_id]
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
        place = self._open.pop(prompt_id).place
        del self._first[prompt_id]
        self._open_versions[self.table.oldest_versions[place]] -= 1
        self.table.close(place)

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
        """Those of open groups."""
        table, rows = self.table, self._open_rows()
        rows = rows[view(table.lengths)[rows] > 0]
        order = np.argsort(self.prompt_tokens(rows) + view(table.lengths)[rows], kind="stable")
        fresh: list[Sample] = []
        for row in rows[order].tolist():
            if len(fresh) == limit:
                break
            sample = table.sample(row)
            if sample.completions[-1].context_version == policy_version:
                fresh.append(sample)
        return fresh

    def lengths(self, *, without: Iterable[int] = ()) -> tuple[NDArray[np.intc], NDArray[np.bool_]]:
        """Response tokens of all samples of open groups but those `without` [n], and whether those
        are finished.
        """
        rows = self._open_rows(without=without)
        return view(self.table.lengths)[rows], view(self.table.is_finished)[rows]

    def _open_rows(self, *, without: Iterable[int] = ()) -> NDArray[np.int64]:
        """Of all samples of open groups, those of the oldest prompt first."""
        ids = self._open.keys() - set(without) if without else self._open
        return self.table.rows([self._open[prompt_id].place for prompt_id in sorted(ids)])

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
        return int(self.lengths()[0].sum(dtype=np.int64))

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
        """Hold what was saved, when empty; engines beyond `num_engines` are no more."""
        assert not self._open
        assert not self._ready
        for group in state["open"]:
            self._add(OpenGroup.restore(group, self.table, num_engines=num_engines))
        ready = [
            ScoredGroup(group=restore_group(group), rewards=tuple(group["rewards"]))
            for group in state["ready"]
        ]
        self._ready = {
            scored.group.prompt.id: (scored.group.oldest_version or 0, scored) for scored in ready
        }
        places = [group.place for group in self._open.values()]
        self._open_versions = Counter(self.table.oldest_versions[place] for place in places)
        self._ready_versions = Counter(oldest for oldest, _ in self._ready.values())


def _sequence_length(sample: Sample) -> int:
    return len(sample.prompt.token_ids) + sample.num_tokens
