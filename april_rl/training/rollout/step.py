"""One step's rollout, from its first request to its last abort."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from april_rl.errors import EngineStalledError
from april_rl.training.rollout.buffer import Buffer
from april_rl.training.rollout.dispatch import Dispatch, RequestRules
from april_rl.training.rollout.groups import Groups
from april_rl.training.rollout.open_group import SampleState
from april_rl.training.rollout.ports import Outside, PromptSource
from april_rl.training.rollout.record import GroupEvents, StepRecord
from april_rl.training.rollout.stop_rule import Filter, is_limit_reached, must_wait, no_signal_error
from april_rl.types import Completion, Reply, Score

# With fewer, long groups that wait leave slots empty (docs/experiments.md).
_FEWEST_LIVE, _FEWEST_LIVE_BATCHES = 40, 3
# Consecutive idle ticks of each engine. Two are under way on each when a sample is sent.
_MANY_IDLE_TICKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRules:
    """Settings of every step of a run."""

    num_groups: int  # N: groups that a step trains
    group_size: int  # G
    refill: bool  # False: a step starts only C samples (one-shot)
    max_staleness: int  # largest age of a token in training, in steps
    finish_stale: bool  # whether to wait for groups that would become too old, or mask tokens
    max_rejected_groups: int  # groups that a step may lose; 0: no limit
    group_filter: Filter = field(default_factory=Filter)
    requests: RequestRules
    abort_timeout_s: float
    tick_timeout_s: float
    deterministic: bool  # whether to wait for all scores before continuing

    def max_live(self, num_slots: int) -> int:
        """Return how many groups may be open or ready: half of what can be trained within the
        staleness cap, or what keeps `num_slots` samples in flight if that is more.

        With more, steps would alternate: one waits for groups that are due while others become
        ready, and the next ones train those at once, all of them short responses. The limit also
        keeps a run with a slow reward from opening ever more prompts.
        """
        most = self.num_groups * (self.max_staleness + 1)
        needed = num_slots // self.group_size + self.num_groups
        fewest = max(_FEWEST_LIVE, _FEWEST_LIVE_BATCHES * self.num_groups)
        return min(most, max(most // 2, needed, fewest))


class Step:
    """The rollout of one step, and everything that lives only that long.

    It loops over: open groups and assign samples (`_launch`), take in what engines finished
    (`_advance`), take in replies and scores, until the stop rule holds (`_is_enough`).
    """

    def __init__(
        self,
        rules: StepRules,
        record: StepRecord,
        *,
        dispatch: Dispatch,
        buffer: Buffer,
        groups: Groups,
        outside: Outside,
        prompts: PromptSource,
        may_open: bool,
    ) -> None:
        """Take the parts of a step; `record` has its policy version and C, and gets its events."""
        self._rules = rules
        self._record = record
        self._dispatch = dispatch
        self._buffer = buffer
        self._groups = groups
        self._outside = outside
        self._prompts = prompts
        self._may_open = may_open
        # Samples that the step may still start; a lost group gives its samples back.
        self._allowance = math.inf if rules.refill else record.num_slots
        self._generated_tokens = 0
        self._num_idle_ticks = 0  # ticks since an engine computed something

    def generate(self, on_progress: Callable[[int, float], None] | None) -> None:
        """Generate and score until the step ends; call `on_progress` as in `Collector.collect`."""
        self._resume()
        while not self._is_enough():
            self._launch()
            if not (self._dispatch.is_idle or self._has_lost_samples):
                self._advance()
            elif not (self._await_replies() or self._start_more()):
                break
            if on_progress is not None:
                speed = self._generated_tokens / max(self._record.now_s, 1e-9)
                on_progress(self._buffer.num_ready, speed)

    def abort_and_park(self, timeout_s: float) -> None:
        """Stop all engines and park unfinished samples; raise EngineStalledError."""
        began_s = self._record.now_s
        with self._record.waiting("abort"):
            completions, stalled = self._dispatch.abort(timeout_s)
        self._extend(completions)
        self._groups.park(stalled=stalled)
        self._groups.send()
        self._record.stop_s = self._record.now_s - began_s
        if stalled:
            raise EngineStalledError(
                f"engine {stalled[0]} did not return its samples within "
                f"{timeout_s:g} s; they are parked with the tokens "
                "they had before this step"
            )

    def _resume(self) -> None:
        """Resume the parked groups; their samples return to the engines that had them."""
        for group in self._groups.resume():
            self._dispatch.add(group)
            self._record.ask(group.sample_ids(SampleState.acting))
        self._allowance -= self._dispatch.return_to_engines(limit=self._allowance)

    def _is_enough(self) -> bool:
        """Return whether the step has its groups or lost too many, and no group must finish in
        it.
        """
        buffer, rules, version = self._buffer, self._rules, self._record.policy_version
        if buffer.num_ready < rules.num_groups and not self._is_hopeless():
            return False
        return not rules.finish_stale or not must_wait(
            open_versions=buffer.open_versions(policy_version=version),
            ready_versions=buffer.ready_versions(),
            num_groups=rules.num_groups,
            oldest_allowed=version - rules.max_staleness,
            policy_version=version,
        )

    def _is_hopeless(self) -> bool:
        """Return whether the limit on lost groups is reached; raise RunError if none is ready."""
        lost = self._buffer.events.lost
        if not is_limit_reached(self._rules.max_rejected_groups, lost):
            return False
        if not self._buffer.num_ready:
            # A resumed run, perhaps with another reward, may lose as many again.
            self._buffer.events = GroupEvents()
            raise no_signal_error(lost, self._rules.group_filter)
        return True

    def _launch(self) -> None:
        """Assign samples while engines have room, and keep ticks under way."""
        self._open_until(min(self._allowance, self._dispatch.slots.room))
        self._allowance -= self._dispatch.assign(limit=self._allowance)
        self._dispatch.launch()

    def _open_until(self, num_samples: float) -> None:
        """Open groups, as far as allowed, until enough samples wait or begin."""
        num_beginning = self._buffer.num_beginning
        while self._dispatch.num_waiting + num_beginning < num_samples and self._may_open_another():
            group = self._groups.open(self._prompts.take())
            self._dispatch.add(group)
            beginning = group.sample_ids(SampleState.acting)
            self._record.ask(beginning)
            num_beginning += len(beginning)
        self._groups.send()

    def _may_open_another(self) -> bool:
        buffer, rules = self._buffer, self._rules
        return (
            self._may_open
            and buffer.num_live < rules.max_live(self._record.num_slots)
            and buffer.num_ready < rules.num_groups
            and not is_limit_reached(rules.max_rejected_groups, buffer.events.lost)
        )

    def _advance(self) -> None:
        """Wait for ticks to end; take in what they finished, and the scores known by now."""
        with self._record.waiting("ticks"):
            ticks = self._dispatch.wait(self._rules.tick_timeout_s)
        for engine, tick in ticks:
            self._num_idle_ticks = 0 if tick.engine_steps else self._num_idle_ticks + 1
            self._record.ticks.append((engine, tick))
            self._extend(tick.finished, engine=engine)
        self._groups.send()
        self._take_replies(wait_s=0.0)

    def _extend(self, completions: Sequence[Completion], *, engine: int | None = None) -> None:
        """Add completions to their samples, and free their slots."""
        expected = self._groups.extend(
            completions, policy_version=self._record.policy_version, engine=engine
        )
        for group, completion in expected:
            self._record.take_back(group, completion)
            self._dispatch.take_back(group, completion)
            self._generated_tokens += len(completion.token_ids)

    @property
    def _has_lost_samples(self) -> bool:
        """Return whether all engines are repeatedly idle, and have not returned all samples."""
        return self._num_idle_ticks >= _MANY_IDLE_TICKS * self._dispatch.num_engines

    def _await_replies(self) -> bool:
        """Wait for scores and replies; return False if none is missing."""
        if not self._buffer.has_missing_replies:
            return False
        with self._record.waiting("scores"):
            self._take_replies(wait_s=1.0)
        return True

    def _start_more(self) -> bool:
        """Open another group in a one-shot step; return False if there is none."""
        self._allowance += self._rules.group_size
        self._open_until(1)
        return self._dispatch.num_waiting > 0 and not self._has_lost_samples

    def _take_replies(self, *, wait_s: float) -> None:
        """Take in the scores and replies known after `wait_s`; with `deterministic`, wait for
        all replies to everything that was sent, and to everything that is sent because of them.
        """
        if not self._rules.deterministic:
            self._take_in(self._outside.collect(wait_s))
            return
        while replies := self._outside.collect(None):
            self._take_in(replies)

    def _take_in(self, known: Sequence[Score | Reply]) -> None:
        """Take in scores, which settle groups, and replies, whose samples finish or continue."""
        scores = [each for each in known if isinstance(each, Score)]
        self._allowance += self._rules.group_size * self._groups.take_scores(scores)
        replies = [each for each in known if isinstance(each, Reply)]
        for group, reply in self._groups.take_replies(replies):
            self._record.observe(reply)
            if reply.observation.is_final:
                continue
            self._dispatch.add_turn(group)
            turns = group.sample(reply.sample_id.index).completions
            if turns and turns[-1].policy_version == self._record.policy_version:
                self._allowance += 1  # the step has already started this sample
        self._groups.send()
