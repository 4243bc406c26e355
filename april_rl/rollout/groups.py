"""What becomes of samples that come back: their group grows, is scored, and then is ready, rejected
or dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from april_rl.rollout.buffer import Buffer, OpenGroup
from april_rl.rollout.ledger import Ledger, State
from april_rl.rollout.ports import Scorer
from april_rl.rollout.stats import StepStats
from april_rl.types import Completion, Prompt, Sample, Score, ScoredGroup


class Groups:
    """Owner of buffer and ledger: every group from its opening to its end."""

    def __init__(
        self, scorer: Scorer, *, group_size: int, keep: Callable[[ScoredGroup], bool]
    ) -> None:
        """`keep` is the filter: True for groups worth training."""
        self.buffer, self.ledger = Buffer(), Ledger()
        self._scorer, self._group_size, self._keep = scorer, group_size, keep

    def open(self, prompt: Prompt) -> list[Sample]:
        """A new group's samples, all empty."""
        self.ledger.open(prompt.id)
        return self.buffer.open(prompt, self._group_size).samples

    def resume(self) -> list[Sample]:
        """Parked groups are in flight again; returns their unfinished samples, the oldest first."""
        unfinished: list[Sample] = []
        for group in self.buffer.open_groups():
            self.ledger.move(group.prompt.id, State.in_flight)
            unfinished += group.unfinished
        return unfinished

    def park(self) -> None:
        """The groups in flight outlive their step."""
        for group in self.buffer.open_groups():
            self.ledger.move(group.prompt.id, State.parked)

    def extend(self, completion: Completion) -> Sample:
        """Append a completion to its sample, and have it scored when it is finished."""
        sample = self.buffer.extend(completion)
        if sample.is_finished:
            self._scorer.submit(sample)
        return sample

    def score(self, scores: Iterable[Score], stats: StepStats) -> int:
        """Note scores; returns how many groups were rejected or dropped, whose slots are free."""
        last = (self.buffer.score(score) for score in scores)
        return sum(not self._settle(group, stats) for group in last if group is not None)

    def take(self, num_groups: int) -> list[ScoredGroup]:
        """At most `num_groups` ready groups, the oldest first: they are trained now. Checks the
        ledger.
        """
        groups = self.buffer.take_ready(num_groups)
        for scored in groups:
            self.ledger.move(scored.group.prompt.id, State.trained)
        self.ledger.check(parked=self.buffer.num_open, ready=self.buffer.num_ready)
        return groups

    def _settle(self, group: OpenGroup, stats: StepStats) -> bool:
        """Whether a complete, scored group becomes ready; else it is rejected or dropped."""
        prompt_id, failure = group.prompt.id, group.failure()
        if failure is None and self._keep(scored := group.scored()):
            self.buffer.make_ready(scored)
            self.ledger.move(prompt_id, State.ready)
            return True
        self.buffer.remove(prompt_id)
        if failure is None:
            stats.rejected_groups += 1
            self.ledger.move(prompt_id, State.rejected)
        else:
            self.ledger.move(prompt_id, State.dropped, reason=f"reward {failure}")
        return False
