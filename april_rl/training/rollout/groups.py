"""The life of groups: they are opened, resumed, extended, settled and parked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable

from april_rl.training.rollout.buffer import Buffer, LedgerError
from april_rl.training.rollout.open_group import OpenGroup, SampleState
from april_rl.training.rollout.ports import Outside
from april_rl.types import Completion, Prompt, Reply, Sample, Score, ScoredGroup


class Groups:
    """The groups of a buffer, between their opening and their training."""

    def __init__(
        self,
        buffer: Buffer,
        outside: Outside,
        *,
        keep: Callable[[ScoredGroup], bool],
        failed: float | None = None,
    ) -> None:
        """`keep` is the filter: True for groups that are worth training. `failed` is the reward
        of samples whose engine or reward failed; None: their group is dropped.
        """
        self._buffer = buffer
        self._outside = outside
        self._keep = keep
        self._failed = failed
        self._unsent: deque[Sample] = deque()  # acting or finished samples, not yet sent

    def open(self, prompt: Prompt) -> OpenGroup:
        """Open a group for a prompt; its environment, if it has one, begins."""
        group = self._buffer.open(prompt)
        self._unsent += map(group.sample, group.indices(SampleState.acting))
        return group

    def resume(self) -> list[OpenGroup]:
        """Put parked groups in flight, let their samples wait, and return them, oldest first."""
        self._buffer.is_step_under_way = True
        groups = list(self._buffer.open_groups())
        for group in groups:
            group.move_all(SampleState.parked, to=SampleState.waiting)
        return groups

    def park(self, *, stalled: Container[int]) -> None:
        """End a step by parking the groups in flight.

        Samples of `stalled` engines keep what they had before this step. Raise LedgerError when
        another engine did not give a sample back.
        """
        self._buffer.is_step_under_way = False
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
            raise LedgerError(f"the engines did not return samples {lost[:5]}")

    def extend(
        self,
        completions: Iterable[Completion],
        *,
        policy_version: int,
        engine: int | None = None,
    ) -> list[tuple[OpenGroup, Completion]]:
        """Append completions of a step of `policy_version` to their samples; return the expected
        ones with their groups.

        Late completions are ignored: they have an earlier version than the step's, do not start
        where their sample ends, or come from another engine than the one that has the sample (with
        `engine` None, any engine may have it). Then call `send`: environments reply to ended turns,
        and finished samples are scored.
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
            if group.extend(completion):
                self._unsent.append(group.sample(completion.sample_id.index))
        return expected

    def send(self) -> None:
        """Ask environments and rewards about the samples that began, ended a turn or finished since
        the last call. Samples are sent in the order of their prompts, as in `send_again`, so that a
        reward with a state sees the same order in a resumed run.

        Separate from `extend` because it may raise: everything that engines gave back is in its
        group by then.
        """
        self._unsent = deque(sorted(self._unsent, key=lambda sample: sample.id))
        while self._unsent:
            self._send(self._unsent.popleft(), group_size=self._buffer.group_size)

    def send_again(self) -> None:
        """Send the samples of a restored buffer that have no reply or no score yet. Settle groups
        whose filter had failed, which was the end of the run.
        """
        for group in list(self._buffer.open_groups()):
            if group.is_scored:
                self._settle(group)
                continue
            num_unscored = len(group.states) - len(group.indices(SampleState.scored))
            for index, state in enumerate(group.states):
                if state in (SampleState.acting, SampleState.finished):
                    self._send(group.sample(index), group_size=num_unscored)

    def _send(self, sample: Sample, *, group_size: int) -> None:
        if sample.is_finished:
            self._outside.submit(sample, group_size=group_size)
        else:
            self._outside.act(sample)

    def take_replies(self, replies: Iterable[Reply]) -> list[tuple[OpenGroup, Reply]]:
        """Add replies of environments to their samples; return the expected ones with their
        groups. A reply to another turn than a sample's last one is ignored. Then call `send`, so
        that finished samples are scored.
        """
        is_in_step = self._buffer.is_step_under_way
        unfinished = SampleState.waiting if is_in_step else SampleState.parked
        expected = []
        for reply in replies:
            prompt_id, index = reply.sample_id
            group = self._buffer.group(prompt_id)
            if group is None or not group.expects_reply(reply):
                continue
            group.observe(index, reply.observation, unfinished=unfinished)
            expected.append((group, reply))
            if reply.observation.is_final:
                self._unsent.append(group.sample(index))
        return expected

    def take_scores(self, scores: Iterable[Score]) -> int:
        """Record scores; return how many groups they complete that are rejected or dropped."""
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
        scored = group.to_scored(failed=self._failed)
        is_kept = self._keep(scored)
        if is_kept:
            self._buffer.make_ready(scored)
        else:
            self._buffer.reject(scored)
        return is_kept
