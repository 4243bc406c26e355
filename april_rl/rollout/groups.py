"""The life of groups: opened, extended by completions, scored, and then ready, rejected or
dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable

from april_rl.rollout.buffer import Buffer
from april_rl.rollout.codec import (
    Plain,
    restore_open_group,
    restore_ready_group,
    save_open_group,
    save_ready_group,
)
from april_rl.rollout.ledger import Ledger, LedgerError, State
from april_rl.rollout.length_bias import LengthBias
from april_rl.rollout.open_group import Failure, OpenGroup, SampleState
from april_rl.rollout.ports import Scorer
from april_rl.rollout.stats import StepStats
from april_rl.types import Completion, Prompt, Sample, Score, ScoredGroup


class Groups:
    """Owner of buffer, ledger and length bias: every group from its opening to its end."""

    def __init__(
        self, scorer: Scorer, *, group_size: int, keep: Callable[[ScoredGroup], bool]
    ) -> None:
        """`keep` is the filter: True for groups that are worth training."""
        self.buffer = Buffer(group_size)
        self.ledger = Ledger()
        self.length_bias = LengthBias()
        self.last_failure = ""  # why the last group was dropped
        self._rejected_before = 0  # groups rejected until the last `take`
        self._dropped_before = 0
        self._scorer = scorer
        self._keep = keep
        self._unsubmitted: deque[Sample] = deque()  # finished, not yet submitted to the scorer

    def open(self, prompt: Prompt) -> OpenGroup:
        """Open a group; all its samples wait for an engine."""
        self.ledger.open(prompt.id)
        self.length_bias.open(prompt.id)
        return self.buffer.open(prompt)

    def resume(self) -> list[OpenGroup]:
        """Begin a step: parked groups are in flight again, and their unfinished samples wait.

        Return the open groups, oldest first.
        """
        self.length_bias.begin_step()
        self.ledger.move_all(State.parked, to=State.in_flight)
        groups = list(self.buffer.open_groups())
        for group in groups:
            group.move_all(SampleState.parked, to=SampleState.waiting)
        return groups

    def park(self, *, stalled: Container[int]) -> None:
        """End a step by parking the groups in flight.

        Samples of `stalled` engines keep what they had before this step. Raise LedgerError when
        another engine did not give a sample back.
        """
        self.ledger.move_all(State.in_flight, to=State.parked)
        lost = []
        for group in self.buffer.open_groups():
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
        stats: StepStats,
        *,
        engine: int | None = None,
    ) -> list[tuple[OpenGroup, Completion]]:
        """Append completions to their samples and count them; return the expected ones with their
        groups.

        Late completions are ignored: of an earlier version than the step's, for a sample that does
        not end where they start, or from another engine than the one that has the sample (with
        `engine` None, any engine may have it). Call `submit` to have finished samples scored.
        """
        expected = []
        for completion in completions:
            group = self.buffer.group(completion.sample_id.prompt_id)
            if (
                group is None
                or completion.policy_version < stats.policy_version
                or not group.expects(completion, engine=engine)
            ):
                continue
            expected.append((group, completion))
            stats.add_completion(completion, prompt_tokens=len(group.prompt.token_ids))
            sample = group.extend(completion)
            if sample is not None:
                self._unsubmitted.append(sample)
        return expected

    def submit(self) -> None:
        """Submit the samples that finished since the last call to the scorer. Separate from
        `extend` because the scorer may raise: everything that engines gave back is in its group by
        then.
        """
        while self._unsubmitted:
            self._scorer.submit(self._unsubmitted.popleft(), group_size=self.buffer.group_size)

    def score(self, scores: Iterable[Score]) -> int:
        """Record scores; return how many groups were rejected or dropped."""
        return sum(not self._settle(group) for group in self.buffer.score(scores))

    def _settle(self, group: OpenGroup) -> bool:
        """Make a scored group ready, reject it or drop it; return whether it is ready."""
        prompt_id = group.prompt.id
        if group.failure is not None:
            self.length_bias.close(prompt_id, group.lengths, rewards=())
            self._drop(group, group.failure)
            return False
        scored = group.scored()
        self.length_bias.close(prompt_id, group.lengths, rewards=scored.rewards)
        if not self._keep(scored):
            self.buffer.remove(prompt_id)
            self.ledger.move(prompt_id, State.rejected)
            return False
        self.buffer.make_ready(scored)
        self.ledger.move(prompt_id, State.ready)
        return True

    def _drop(self, group: OpenGroup, failure: Failure) -> None:
        prompt_id = group.prompt.id
        self.buffer.remove(prompt_id)
        self.ledger.move(prompt_id, State.dropped, reason=failure.reason)
        self.last_failure = (
            f"sample {failure.sample_id.index} of prompt {prompt_id}: {failure.message}"
        )

    def count_lost(self, stats: StepStats) -> None:
        """Count the groups rejected and dropped since the last `take`: in this step, or between
        steps.
        """
        stats.rejected_groups = self.ledger.count(State.rejected) - self._rejected_before
        stats.dropped_groups = self.ledger.count(State.dropped) - self._dropped_before

    def take(self, groups: Iterable[ScoredGroup]) -> None:
        """Remove ready groups that are trained now. Raise LedgerError when ledger and buffer
        disagree.
        """
        for scored in groups:
            self.buffer.remove_ready(scored.group.prompt.id)
            self.ledger.move(scored.group.prompt.id, State.trained)
        self.ledger.check(parked=self.buffer.num_open, ready=self.buffer.num_ready)
        self._rejected_before = self.ledger.count(State.rejected)
        self._dropped_before = self.ledger.count(State.dropped)

    def save(self) -> Plain:
        """Return buffer, ledger and length bias as plain data; only between steps."""
        return {
            "ledger": self.ledger.save(),
            "buffer": {
                "open": [save_open_group(group) for group in self.buffer.open_groups()],
                "ready": [save_ready_group(scored) for scored in self.buffer.ready_groups()],
            },
            "length_bias": self.length_bias.save(),
            "num_rejected": self.ledger.count(State.rejected) - self._rejected_before,
            "num_dropped": self.ledger.count(State.dropped) - self._dropped_before,
            "last_failure": self.last_failure,
        }

    def restore(self, state: Plain, *, num_engines: int) -> None:
        """Restore `state`, with `num_engines` engines now; submit finished samples without a score
        again.
        """
        assert not self.ledger.opened, "a state is restored before the first step"
        opened = [
            restore_open_group(group, num_engines=num_engines) for group in state["buffer"]["open"]
        ]
        self.buffer.restore(opened, map(restore_ready_group, state["buffer"]["ready"]))
        self.ledger.restore(state["ledger"])
        self.ledger.check(parked=self.buffer.num_open, ready=self.buffer.num_ready)
        self._rejected_before = self.ledger.count(State.rejected) - state["num_rejected"]
        self._dropped_before = self.ledger.count(State.dropped) - state["num_dropped"]
        self.last_failure = state["last_failure"]
        self.length_bias.restore(
            state["length_bias"], open_ids=[group.prompt.id for group in opened]
        )
        for group in opened:
            num_unscored = len(group.states) - len(group.indices(SampleState.scored))
            for index in group.indices(SampleState.finished):
                self._scorer.submit(group.sample(index), group_size=num_unscored)
