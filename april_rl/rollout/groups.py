"""The life of groups: opened, extended by completions, scored, and then ready, rejected or
dropped.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

from april_rl.metrics import Metrics, Sum
from april_rl.rollout.buffer import Buffer
from april_rl.rollout.codec import (
    Plain,
    restore_open_group,
    restore_ready_group,
    save_open_group,
    save_ready_group,
)
from april_rl.rollout.ledger import Ledger, LedgerError, State
from april_rl.rollout.leftovers import Leftovers
from april_rl.rollout.length_bias import LengthBias
from april_rl.rollout.open_group import Failure, OpenGroup, SampleState
from april_rl.rollout.ports import Scorer
from april_rl.types import Completion, Prompt, Sample, Score, ScoredGroup


@dataclass(slots=True, kw_only=True)
class Lost:
    """Groups that a step has lost; those lost to scores that came before it count, too."""

    rejected: int = 0  # by the filter
    dropped: int = 0  # because a reward or an engine failed
    last_failure: str = ""  # why the last one was dropped, maybe in an earlier step

    @property
    def total(self) -> int:
        """Return how many groups were lost."""
        return self.rejected + self.dropped


class Groups:
    """Owner of buffer, ledger and length bias: every group from its opening to its end."""

    def __init__(
        self, scorer: Scorer, *, group_size: int, keep: Callable[[ScoredGroup], bool]
    ) -> None:
        """`keep` is the filter: True for groups that are worth training."""
        self.buffer = Buffer(group_size)
        self.ledger = Ledger()
        self.length_bias = LengthBias()
        self.lost = Lost()  # since the last `take`
        self._scorer = scorer
        self._keep = keep
        self._unscored: deque[Sample] = deque()  # finished, not yet sent to the scorer

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
            group = self.buffer.group(completion.sample_id.prompt_id)
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
        """Send the samples that finished since the last call to the scorer. Separate from `extend`
        because the scorer may raise: everything that engines gave back is in its group by then.
        """
        while self._unscored:
            self._scorer.submit(self._unscored.popleft(), group_size=self.buffer.group_size)

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
            self.lost.rejected += 1
            return False
        self.buffer.make_ready(scored)
        self.ledger.move(prompt_id, State.ready)
        return True

    def _drop(self, group: OpenGroup, failure: Failure) -> None:
        prompt_id = group.prompt.id
        self.buffer.remove(prompt_id)
        self.ledger.move(prompt_id, State.dropped, reason=failure.reason)
        self.lost.dropped += 1
        self.lost.last_failure = (
            f"sample {failure.sample_id.index} of prompt {prompt_id}: {failure.message}"
        )

    def take(self, groups: Iterable[ScoredGroup]) -> None:
        """Remove ready groups that are trained now, and count losses anew. Raise LedgerError when
        ledger and buffer disagree.
        """
        for scored in groups:
            self.buffer.remove_ready(scored.group.prompt.id)
            self.ledger.move(scored.group.prompt.id, State.trained)
        self.ledger.check(parked=self.buffer.num_open, ready=self.buffer.num_ready)
        self.lost = Lost(last_failure=self.lost.last_failure)

    @property
    def num_ready(self) -> int:
        """Return how many groups wait to be trained."""
        return self.buffer.num_ready

    @property
    def num_alive(self) -> int:
        """Return how many groups are open or ready."""
        return self.buffer.num_open + self.buffer.num_ready

    @property
    def has_unscored(self) -> bool:
        """Return whether a complete group waits for scores."""
        return self.buffer.has_unscored

    def open_versions(self, *, policy_version: int) -> Counter[int]:
        """Count open groups by the version of their oldest token, or `policy_version` without."""
        return self.buffer.open_versions(policy_version=policy_version)

    def ready_versions(self) -> Counter[int]:
        """Count ready groups by the version of their oldest token."""
        return self.buffer.ready_versions()

    def ready_groups(self) -> list[ScoredGroup]:
        """Return the ready groups, oldest token first."""
        return self.buffer.ready_groups()

    def fresh_samples(self, policy_version: int, *, limit: int) -> list[Sample]:
        """Return at most `limit` short samples whose last tokens are of `policy_version` alone."""
        return self.buffer.fresh_samples(policy_version, limit=limit)

    def count_trained(self, groups: Sequence[ScoredGroup], *, num_tokens: int) -> Metrics:
        """Note that these are trained, with so many response tokens; return `ledger/*`,
        `length_bias/*` and the sizes of the buffer.
        """
        buffer = self.buffer
        self.length_bias.train(groups, num_tokens=num_tokens)
        return Metrics(
            {
                "rollout/parked_groups": Sum(buffer.num_open),
                "rollout/parked_tokens": Sum(buffer.open_tokens),
                "rollout/ready_groups": Sum(buffer.num_ready),
                "memory/buffer_bytes": Sum(buffer.num_bytes),
                **self.ledger.metrics(),
                **self.length_bias.metrics(buffer),
            }
        )

    def leftovers(self, *, under_way: Sequence[ScoredGroup]) -> Leftovers:
        """Return what was generated and not trained; `under_way` was taken for an update that
        failed.
        """
        return Leftovers(
            collected=[scored.group.samples for scored in under_way],
            ready=[scored.group.samples for scored in self.buffer.ready_groups()],
            parked=[group.samples for group in self.buffer.open_groups()],
        )

    def save(self) -> Plain:
        """Return buffer, ledger and length bias as plain data; only between steps."""
        return {
            "ledger": self.ledger.save(),
            "buffer": {
                "open": [save_open_group(group) for group in self.buffer.open_groups()],
                "ready": [save_ready_group(scored) for scored in self.buffer.ready_groups()],
            },
            "length_bias": self.length_bias.save(),
            "num_rejected": self.lost.rejected,
            "num_dropped": self.lost.dropped,
            "last_failure": self.lost.last_failure,
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
        self.lost = Lost(
            rejected=state["num_rejected"],
            dropped=state["num_dropped"],
            last_failure=state["last_failure"],
        )
        self.length_bias.restore(
            state["length_bias"], open_ids=[group.prompt.id for group in opened]
        )
        for group in opened:
            num_unscored = len(group.states) - len(group.indices(SampleState.scored))
            for index in group.indices(SampleState.finished):
                self._scorer.submit(group.sample(index), group_size=num_unscored)
