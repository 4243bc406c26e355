"""Active partial rollouts: start more samples than a step needs, stop at N ready groups, park the
rest, resume it first.

The method (APRIL, arXiv 2509.18521, section 3; instance-level refill as in CoPRIS): C =
round(α·N·G) sample slots are kept in flight. A step fills them with the unfinished samples of
parked groups, the oldest first, then with new prompts. Finished samples are scored while generation
goes on. When N groups are ready (complete, scored, kept by the filter) and none of the others would
be trained beyond the staleness cap, every request is aborted; an unfinished sample keeps its
tokens, behaviour log-probabilities and versions and goes on in the next step with what is left of
its budget.

`over_sampling_factor=1, refill=False` is the plain synchronous loop. Engines are driven in ticks
bounded by engine steps, so with `deterministic` the schedule is a function of configuration and
seed.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from april_rl.errors import RunError
from april_rl.rollout.buffer import Buffer, OpenGroup
from april_rl.rollout.deadlines import must_wait
from april_rl.rollout.dispatch import Dispatch
from april_rl.rollout.ledger import Ledger, State
from april_rl.rollout.ports import Engines, EngineStalledError, PromptSource, Scorer
from april_rl.rollout.stats import StepStats
from april_rl.types import Completion, Sample, Score, ScoredGroup


class NoSignalError(RunError):
    """Group after group was rejected: every reward equals its siblings'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """What a step has collected: at most N groups, the oldest ready ones, and how it went."""

    groups: tuple[ScoredGroup, ...]
    stats: StepStats


class Collector:
    """Owner of buffer and ledger; `collect` is one step's rollout."""

    def __init__(
        self,
        engines: Engines,
        scorer: Scorer,
        prompts: PromptSource,
        *,
        num_groups: int,
        group_size: int,
        over_sampling_factor: float,
        refill: bool,
        max_response_tokens: int,
        max_staleness: int,
        finish_stale: bool,
        keep: Callable[[ScoredGroup], bool],
        max_rejected_groups: int,
        tick_steps: int,
        abort_timeout_s: float,
        tick_timeout_s: float,
        deterministic: bool,
        seed: int,
    ) -> None:
        """Everything is a plain value; `keep` is the filter, True for groups worth training."""
        self.buffer = Buffer()
        self.ledger = Ledger()
        self._engines, self._scorer, self._prompts = engines, scorer, prompts
        self._num_groups, self._group_size = num_groups, group_size
        self._num_slots = round(over_sampling_factor * num_groups * group_size)
        self._refill = refill
        self._max_response_tokens = max_response_tokens
        self._max_staleness, self._finish_stale = max_staleness, finish_stale
        self._keep, self._max_rejected_groups = keep, max_rejected_groups
        self._tick_steps, self._tick_timeout_s = tick_steps, tick_timeout_s
        self._abort_timeout_s = abort_timeout_s
        self._deterministic = deterministic
        self._seed = seed
        self._unscored = 0  # complete groups that wait for scores
        self._allowance = 0.0  # samples the step may still start
        self._expected_tokens = 1.0  # of a response: the running mean of finished ones
        # More groups than are trained within the cap would only grow too stale; so a slow reward
        # cannot make the run open prompts without end either.
        self._max_alive = num_groups * (max_staleness + 1)

    def collect(
        self,
        policy_version: int,
        *,
        may_open: bool = True,
        on_progress: Callable[[int, StepStats], None] | None = None,
    ) -> Collection:
        """One step's rollout with the weights of `policy_version`.

        Returns the N oldest ready groups; fewer only when `may_open` is false and nothing is left
        to finish, or when the bound on rejected groups was reached. Every group not returned is
        parked or ready, with all its tokens. Raises NoSignalError when that bound was reached with
        no group ready, EngineStalledError when an engine does not answer; also then nothing but the
        stalled engine's tokens of this step is lost.
        """
        self._begin(policy_version, may_open)
        try:
            self._generate(on_progress)
        except (EngineStalledError, NoSignalError):
            self._abort_and_park()
            raise
        self._abort_and_park()
        groups = self.buffer.take_ready(self._num_groups)
        for scored in groups:
            self.ledger.move(scored.group.prompt.id, State.trained)
        self.ledger.check(parked=self.buffer.num_open, ready=self.buffer.num_ready)
        self._stats.end(groups, buffer=self.buffer)
        return Collection(groups=tuple(groups), stats=self._stats)

    def settle_scores(self) -> None:
        """Between steps: wait for every outstanding score, so that the scorer is free again."""
        self._take_scores(self._scorer.collect(None))

    # The phases of a step.

    def _begin(self, policy_version: int, may_open: bool) -> None:
        self._dispatch = Dispatch(
            self._engines,
            num_slots=self._num_slots,
            tick_steps=self._tick_steps,
            max_response_tokens=self._max_response_tokens,
            seed=self._seed,
        )
        self._version, self._may_open = policy_version, may_open
        self._unscored = 0
        # One-shot over-provisioning starts C samples and no more; a rejected or dropped group gives
        # its slots back.
        self._allowance = math.inf if self._refill else float(self._num_slots)
        self._waiting: deque[Sample] = deque()
        self._stats = StepStats(num_slots=self._num_slots, policy_version=policy_version)
        for group in self.buffer.open_groups():
            self.ledger.move(group.prompt.id, State.in_flight)
            self._waiting.extend(group.unfinished)
            self._unscored += group.is_complete

    def _generate(self, on_progress: Callable[[int, StepStats], None] | None) -> None:
        """Launch, wait, absorb, score until it is enough or nothing is left to do."""
        while not self._is_enough():
            self._launch()
            if not self._dispatch.is_idle:
                self._advance()
            elif not (self._await_scores() or self._start_more()):
                break
            if on_progress is not None:
                on_progress(self.buffer.num_ready, self._stats)

    def _is_enough(self) -> bool:
        """Whether the step has its groups, or goes without, and none has to finish in it."""
        if self.buffer.num_ready < self._num_groups and not self._is_hopeless():
            return False
        return not self._finish_stale or not must_wait(
            open_versions=self.buffer.open_versions(),
            ready_versions=self.buffer.ready_versions(),
            num_groups=self._num_groups,
            oldest_allowed=self._version - self._max_staleness,
            policy_version=self._version,
        )

    def _is_hopeless(self) -> bool:
        """Whether the bound on rejected groups was reached; NoSignalError when nothing is ready."""
        rejected = self._stats.rejected_groups
        if not self._max_rejected_groups or rejected < self._max_rejected_groups:
            return False
        if not self.buffer.num_ready:
            raise NoSignalError(
                f"{rejected} groups had equal rewards for all their samples "
                "(rollout.max_rejected_groups): the task is too easy or too hard for this model, "
                "or the reward is constant; nothing can be learned from it"
            )
        return True

    def _launch(self) -> None:
        """Hand out samples while engines have room, and keep ticks under way."""
        while self._allowance > 0 and (sample := self._next_sample()) is not None:
            if not self._dispatch.submit(sample, expected_tokens=self._expected_tokens):
                break
            self._waiting.popleft()
            self._allowance -= 1
        self._dispatch.launch()

    def _next_sample(self) -> Sample | None:
        """The head of the queue: samples of parked groups, the oldest first, then those of a new
        prompt.
        """
        if not self._waiting:
            is_full = self.buffer.num_open + self.buffer.num_ready >= self._max_alive
            has_enough = self.buffer.num_ready >= self._num_groups
            if not self._may_open or is_full or has_enough:
                return None
            prompt = self._prompts.take()
            self.ledger.open(prompt.id)
            self._waiting.extend(self.buffer.open(prompt, self._group_size).samples)
        return self._waiting[0]

    def _advance(self) -> None:
        started = time.perf_counter()
        ticks = self._dispatch.wait(self._tick_timeout_s)
        self._stats.waited_s += time.perf_counter() - started
        for engine, tick in ticks:
            self._stats.add_tick(tick)
            for completion in tick.finished:
                self._absorb(completion, engine)
        self._take_scores(self._known_scores(wait_s=0.0))

    def _await_scores(self) -> bool:
        """Nothing is left to generate: wait for scores; False when there is nothing to wait for
        either.
        """
        if not self._unscored:
            return False
        started = time.perf_counter()
        scores = self._known_scores(wait_s=1.0)
        self._stats.score_s += time.perf_counter() - started
        self._stats.waited_s += time.perf_counter() - started
        self._take_scores(scores)
        return True

    def _start_more(self) -> bool:
        """One-shot, and all is used up: start another group; False when there is none."""
        self._allowance += self._group_size
        return self._next_sample() is not None

    def _abort_and_park(self) -> None:
        started = time.perf_counter()
        completions, stalled = self._dispatch.abort(self._abort_timeout_s)
        self._stats.abort_s = time.perf_counter() - started
        self._stats.waited_s += self._stats.abort_s
        for engine, completion in completions:
            self._absorb(completion, engine)
        for group in self.buffer.open_groups():
            self.ledger.move(group.prompt.id, State.parked)
        if stalled:
            raise EngineStalledError(
                f"engine {stalled[0]} did not give its samples back within "
                f"rollout.abort_timeout_s = {self._abort_timeout_s:g} s; they are parked with the "
                "tokens they had before this step"
            )

    # Single events.

    def _absorb(self, completion: Completion, engine: int) -> None:
        """Append what an engine returned, unless it comes late: from an engine that has the sample
        no more, of an earlier version, or to be put where the sample no longer ends.
        """
        sample = self.buffer.sample(completion.sample_id)
        if sample is None or not self._dispatch.has(sample.id, engine=engine):
            return
        if completion.policy_version < self._version or completion.start != sample.num_tokens:
            return
        self._dispatch.free(sample.id)
        if not completion.token_ids and completion.finish_reason is None:
            return
        self._stats.add_completion(completion, num_prompt_tokens=len(sample.prompt.token_ids))
        sample = self.buffer.extend(completion)
        if sample.is_finished:
            self._expected_tokens += 0.05 * (sample.num_tokens - self._expected_tokens)
            self._scorer.submit(sample)
            self._unscored += self.buffer.is_complete(sample.prompt.id)

    def _known_scores(self, *, wait_s: float) -> list[Score]:
        """What the scorer knows after `wait_s`; with `deterministic` all it was given."""
        return self._scorer.collect(None if self._deterministic else wait_s)

    def _take_scores(self, scores: Iterable[Score]) -> None:
        for score in scores:
            group = self.buffer.score(score)
            if group is not None:
                self._unscored -= 1
                self._settle(group)

    def _settle(self, group: OpenGroup) -> None:
        """A complete, scored group becomes ready, or is rejected or dropped and gives its slots
        back.
        """
        prompt_id, failure = group.prompt.id, group.failure()
        if failure is None and self._keep(scored := group.scored()):
            self.buffer.make_ready(scored)
            self.ledger.move(prompt_id, State.ready)
            return
        self.buffer.remove(prompt_id)
        self._allowance += self._group_size
        if failure is None:
            self._stats.rejected_groups += 1
            self.ledger.move(prompt_id, State.rejected)
        else:
            self.ledger.move(prompt_id, State.dropped, reason=f"reward {failure}")
