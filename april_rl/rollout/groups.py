"""The life of groups: resumed, extended by completions, sent to be scored, settled, parked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable

from april_rl.rollout.buffer import Buffer, LedgerError
from april_rl.rollout.open_group import OpenGroup, SampleState
from april_rl.rollout.ports import Scorer
from april_rl.types import Completion, Sample, Score, ScoredGroup


class Groups:
    """The groups of a buffer, between their opening and their training."""

    def __init__(
        self,
        buffer: Buffer,
        scorer: Scorer,
        *,
        keep: Callable[[ScoredGroup], bool],
        failed: float | None = None,
    ) -> None:
        """`keep` is the filter: True for groups that are worth training. `failed` is the reward of
        samples that their engine or their reward failed; None: their group is dropped.
        """
        self._buffer = buffer
        self._scorer = scorer
        self._keep = keep
        self._failed = failed
        self._unscored: deque[Sample] = deque()  # finished, not yet sent to the scorer

    def resume(self) -> list[OpenGroup]:
        """Begin a step: parked groups are in flight again, and their unfinished samples wait.

        Return the open groups, oldest first.
        """
        self._buffer.begin_step()
        groups = list(self._buffer.open_groups())
        for group in groups:
            group.move_all(SampleState.parked, to=SampleState.waiting)
        return groups

    def park(self, *, stalled: Container[int]) -> None:
        """End a step by parking the groups in flight.

        Samples of `stalled` engines keep what they had before this step. Raise LedgerError when
        another engine did not give a sample back.
        """
        self._buffer.end_step()
        lost = []
        for group in self._buffer.open_groups():
            lost += [
                sample_id
                for sample_id in group.sample_ids(SampleState.running)
                if group.engines[sample_id.index] not in stalled
            ]
            group.move_all(SampleState.running, to=SampleState.parked)
            group.move_all(SampleState.waiting, to=SampleState.parked)
        if lost:
            raise LedgerError(f"the engines did not give back samples {lost[:5]}")

    def extend(
        self,
        completions: Iterable[Completion],
        *,
        policy_version: int,
        engine: int | None = None,
    ) -> list[tuple[OpenGroup, Completion]]:
        """Append completions of a step of `policy_version` to their samples; return the expected
        ones with their groups.

        Late completions are ignored: of an earlier version than the step's, for a sample that does
        not end where they start, or from another engine than the one that has the sample (with
        `engine` None, any engine may have it). Call `send_to_scorer` to have finished samples
        scored.
        """
        expected = []
        for completion in completions:
            group = self._buffer.group(completion.sample_id.prompt_id)
            if (
                group is None
                or completion.policy_version < policy_version
                or not group.expects(completion, engine=engine)
            ):
                continue
            expected.append((group, completion))
            sample = group.extend(completion)
            if sample is not None:
                self._unscored.append(sample)
        return expected

    def send_to_scorer(self) -> None:
        """Send the samples that finished since the last call to the scorer, by prompt, as
        `send_again` does: a reward with a state sees them in the same order in a resumed run.

        Separate from `extend` because the scorer may raise: everything that engines gave back is in
        its group by then.
        """
        self._unscored = deque(sorted(self._unscored, key=lambda sample: sample.id))
        while self._unscored:
            self._scorer.submit(self._unscored.popleft(), group_size=self._buffer.group_size)

    def send_again(self) -> None:
        """Send the finished samples of a restored buffer that have no score to the scorer."""
        for group in self._buffer.open_groups():
            num_unscored = len(group.states) - len(group.indices(SampleState.scored))
            for index in group.indices(SampleState.finished):
                self._scorer.submit(group.sample(index), group_size=num_unscored)

    def take_scores(self, scores: Iterable[Score]) -> int:
        """Record scores, and settle the groups that they complete; return how many of these were
        rejected or dropped. Scores of groups that are not open any more are ignored.
        """
        complete: dict[int, OpenGroup] = {}
        for score in scores:
            group = self._buffer.group(score.sample_id.prompt_id)
            if group is not None:
                group.add_score(score)
                if group.is_scored:
                    complete[group.prompt.id] = group
        return sum(not self._settle(group) for group in complete.values())

    def _settle(self, group: OpenGroup) -> bool:
        """Make a scored group ready, reject it or drop it; return whether it is ready."""
        if group.failure is not None and self._failed is None:
            self._buffer.drop(group.failure)
            return False
        scored = group.scored(failed=self._failed)
        is_kept = self._keep(scored)
        if is_kept:
            self._buffer.make_ready(scored)
        else:
            self._buffer.reject(scored)
        return is_kept
