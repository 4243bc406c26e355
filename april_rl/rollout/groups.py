"""What becomes of samples that come back: their group grows, is scored, and then is ready, rejected
or dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from april_rl.rollout.buffer import Buffer
from april_rl.rollout.ledger import Ledger, LedgerError, State
from april_rl.rollout.length_bias import LengthBias
from april_rl.rollout.open_group import OpenGroup
from april_rl.rollout.ports import Scorer
from april_rl.rollout.returned import Returned, awaited
from april_rl.rollout.sample_table import view
from april_rl.rollout.state import Plain, StateError
from april_rl.rollout.stats import StepStats
from april_rl.ticks import Completions
from april_rl.types import Prompt, Sample, Score, ScoredGroup


class Groups:
    """Owner of buffer, ledger and length bias: every group from its opening to its end."""

    def __init__(
        self, scorer: Scorer, *, group_size: int, keep: Callable[[ScoredGroup], bool]
    ) -> None:
        """`keep` is the filter: True for groups worth training."""
        self.buffer, self.ledger = Buffer(group_size), Ledger()
        self.length_bias = LengthBias()
        self.last_failure = ""  # why the last dropped group has no reward
        self._rejected_before = self._dropped_before = 0  # groups, up to the last `take`
        self._scorer, self._keep = scorer, keep
        self._unsubmitted: deque[Sample] = deque()  # finished, and unknown to the scorer

    def open(self, prompt: Prompt) -> OpenGroup:
        """A new group, all its samples empty."""
        self.ledger.open(prompt.id)
        self.length_bias.open(prompt.id)
        return self.buffer.open(prompt)

    def resume(self) -> NDArray[np.int64]:
        """A new step: parked groups are in flight again; returns the rows of their unfinished
        samples, those of the oldest prompt first.
        """
        self.length_bias.begin_step()
        self.ledger.move_all(State.parked, to=State.in_flight)
        return self.buffer.unfinished()

    def park(self, *, stalled: Container[int]) -> None:
        """The groups in flight outlive their step; what the `stalled` engines have is theirs no
        more. Raises LedgerError when another one kept a sample.
        """
        self.ledger.move_all(State.in_flight, to=State.parked)
        table = self.buffer.table
        held = np.flatnonzero(view(table.work)).tolist()
        view(table.work)[held] = 0.0
        lost = [table.sample(row).id for row in held if table.homes[row] not in stalled]
        if lost:
            raise LedgerError(f"the engines gave back nothing for samples {sorted(lost)[:5]}")

    def extend(
        self,
        completions: Completions,
        stats: StepStats,
        *,
        engines: NDArray[np.integer[Any]] | None = None,
    ) -> Returned:
        """Append what came back of requests to their samples and count it in `stats`; `submit` has
        those scored that are finished by it. Returns what was awaited of it (`returned.awaited`).
        """
        columns = completions.columns
        returned = awaited(
            completions,
            self.buffer.rows_of(columns.prompt_id, columns.index),
            self.buffer.table,
            policy_version=stats.policy_version,
            engines=engines,
        )
        view(self.buffer.table.work)[returned.rows] = 0.0
        brought = returned.with_slot
        stats.add_returned(brought, prompt_tokens=self.buffer.prompt_tokens(brought.rows))
        self._unsubmitted += self.buffer.extend(brought, policy_version=stats.policy_version)
        return returned

    def submit(self) -> None:
        """Have the samples scored that were finished since the last call. Apart from `extend`, for
        the scorer may raise, and then all that engines gave back is in its place.
        """
        while self._unsubmitted:
            self._scorer.submit(
                self._unsubmitted.popleft(), group_size=self.buffer.table.group_size
            )

    def score(self, scores: Sequence[Score]) -> int:
        """Note scores; returns how many groups were rejected or dropped, whose slots are free."""
        places = self.buffer.score(scores) if scores else []
        return self._settle(places) if places else 0

    def count(self, stats: StepStats) -> None:
        """Groups rejected and dropped since the last `take`: in this step, or between the two."""
        stats.rejected_groups = self.ledger.count(State.rejected) - self._rejected_before
        stats.dropped_groups = self.ledger.count(State.dropped) - self._dropped_before

    def take(self, num_groups: int) -> tuple[ScoredGroup, ...]:
        """At most `num_groups` ready groups, the oldest first: they are trained now. Checks the
        ledger.
        """
        groups = self.buffer.take_ready(num_groups)
        for scored in groups:
            self.ledger.move(scored.group.prompt.id, State.trained)
        self.ledger.check(parked=self.buffer.num_open, ready=self.buffer.num_ready)
        self._rejected_before = self.ledger.count(State.rejected)
        self._dropped_before = self.ledger.count(State.dropped)
        return tuple(groups)

    def _settle(self, places: Sequence[int]) -> int:
        """Have complete, scored groups become ready, or reject or drop them; returns how many of
        those there are. With hundreds of engines several come together.
        """
        table, groups = self.buffer.table, self.buffer.scored(places)
        lengths = table.of_groups(table.lengths, places).tolist()
        oldest_versions = view(table.oldest_versions)[places].tolist()
        failures = [table.failures.get(place) for place in places]
        is_kept = [
            failure is None and self._keep(scored)
            for scored, failure in zip(groups, failures, strict=True)
        ]
        self.buffer.remove(places)
        of_groups = zip(groups, lengths, oldest_versions, failures, is_kept, strict=True)
        for scored, of_samples, oldest, failure, kept in of_groups:
            prompt_id = scored.group.prompt.id
            rewards = scored.rewards if failure is None else ()
            self.length_bias.close(prompt_id, of_samples, rewards=rewards)
            if failure is not None:
                self._drop(prompt_id, failure)
            elif kept:
                self.buffer.make_ready(scored, oldest_version=max(0, oldest))
                self.ledger.move(prompt_id, State.ready)
            else:
                self.ledger.move(prompt_id, State.rejected)
        return is_kept.count(False)

    def _drop(self, prompt_id: int, failure: Score) -> None:
        self.ledger.move(prompt_id, State.dropped, reason=f"reward {failure.outcome}")
        self.last_failure = (
            f"sample {failure.sample_id.index} of prompt {prompt_id}: {failure.message}"
        )

    def save(self) -> Plain:
        """Buffer, ledger and length bias; between steps."""
        return {
            "ledger": self.ledger.save(),
            "buffer": self.buffer.save(),
            "length_bias": self.length_bias.save(),
            "num_rejected": self.ledger.count(State.rejected) - self._rejected_before,
            "num_dropped": self.ledger.count(State.dropped) - self._dropped_before,
            "last_failure": self.last_failure,
        }

    def restore(self, state: Plain, *, max_response_tokens: int, num_engines: int) -> None:
        """Go on where `state` was saved, with `num_engines` engines now; finished samples without a
        score are submitted again.

        Raises StateError when the run has other settings than those groups can go on with.
        """
        assert not self.ledger.opened, "a state is restored before the first step"
        self.buffer.restore(state["buffer"], num_engines=num_engines)
        self.ledger.restore(state["ledger"])
        self.ledger.check(parked=self.buffer.num_open, ready=self.buffer.num_ready)
        self._rejected_before = self.ledger.count(State.rejected) - state["num_rejected"]
        self._dropped_before = self.ledger.count(State.dropped) - state["num_dropped"]
        self.last_failure = state["last_failure"]
        open_groups = list(self.buffer.open_groups())
        self.length_bias.restore(
            state["length_bias"], open_ids=[group.prompt.id for group in open_groups]
        )
        self._check_budget(max_response_tokens)
        for group in open_groups:
            num_unscored = len(group.rows) - len(group.scores)
            for sample in group.unscored:
                self._scorer.submit(sample, group_size=num_unscored)

    def _check_budget(self, max_response_tokens: int) -> None:
        """Raise StateError unless every unfinished sample may get another token."""
        lengths, is_finished = self.buffer.lengths()
        longest = lengths[~is_finished].max(initial=0)
        if longest >= max_response_tokens:
            raise StateError(
                f"rollout.max_response_tokens={max_response_tokens}, but an unfinished sample has "
                f"{longest} tokens already: resume with no less than before"
            )
