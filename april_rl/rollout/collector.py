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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from april_rl.errors import RunError
from april_rl.rollout.deadlines import must_wait
from april_rl.rollout.dispatch import Dispatch
from april_rl.rollout.factor import OverSampling
from april_rl.rollout.groups import Groups
from april_rl.rollout.lost import is_reached, notes_of, nothing_to_train
from april_rl.rollout.no_cycles import cycle_search_put_off
from april_rl.rollout.ports import Engines, EngineStalledError, PromptSource, Scorer
from april_rl.rollout.state import FORMAT, Plain, check_state
from april_rl.rollout.stats import StepStats
from april_rl.ticks import Completions
from april_rl.types import Score, ScoredGroup

# What an abort may take after Ctrl-C: a tick of a few engine steps, seldom more.
_INTERRUPTED_ABORT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """What a step has collected: at most N groups, the oldest ready ones, and how it went."""

    groups: tuple[ScoredGroup, ...]
    stats: StepStats
    notes: tuple[str, ...]  # for the person who watches: a smaller batch, a change of α


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
        over_sampling: OverSampling,
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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`keep` is the filter, True for groups worth training; `clock` reads seconds."""
        self._groups = Groups(scorer, group_size=group_size, keep=keep)
        self.buffer, self.ledger = self._groups.buffer, self._groups.ledger
        self.length_bias = self._groups.length_bias
        self._dispatch = Dispatch(
            engines,
            self.buffer.table,
            tick_steps=tick_steps,
            max_response_tokens=max_response_tokens,
            seed=seed,
        )
        self._scorer, self._prompts = scorer, prompts
        self._num_groups, self._group_size = num_groups, group_size
        self._over_sampling, self._refill = over_sampling, refill
        self._max_staleness, self._finish_stale = max_staleness, finish_stale
        self._max_rejected_groups = max_rejected_groups
        self._tick_timeout_s, self._abort_timeout_s = tick_timeout_s, abort_timeout_s
        self._deterministic, self._clock = deterministic, clock
        self._stats = StepStats(num_slots=0, policy_version=0, clock=clock)  # of no step yet
        self._allowance = 0.0  # samples the step may still start
        # More groups than are trained within the cap would only grow too stale; so a slow reward
        # cannot make the run open prompts without end either.
        self._max_alive = num_groups * (max_staleness + 1)

    @cycle_search_put_off()
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
        no group ready, EngineStalledError when an engine does not answer, and any RunError of
        engines and scorer; then too, and after KeyboardInterrupt from `on_progress`, nothing but a
        stalled engine's tokens of this step is lost.
        """
        self._begin(policy_version, may_open)
        try:
            self._generate(on_progress)
        except RunError:
            with suppress(EngineStalledError):  # what is at fault is known
                self._abort_and_park(self._abort_timeout_s)
            raise
        except KeyboardInterrupt:  # a person waits
            with suppress(RunError):
                self._abort_and_park(min(self._abort_timeout_s, _INTERRUPTED_ABORT_S))
            raise
        self._abort_and_park(self._abort_timeout_s)
        groups = self._groups.take(self._num_groups)
        self._stats.end(groups, buffer=self.buffer)
        self.length_bias.train(groups, num_tokens=int(self._stats.trained_lengths.sum()))
        notes = notes_of(
            self._stats,
            num_groups=len(groups),
            num_wanted=self._num_groups,
            limit=self._max_rejected_groups,
            last_failure=self._groups.last_failure,
        )
        change = self._over_sampling.observe(self._stats, groups)
        return Collection(
            groups=groups, stats=self._stats, notes=(*notes, *([change] if change else []))
        )

    def settle_scores(self) -> None:
        """Between steps: wait for every outstanding score, so that the scorer is free again; groups
        rejected by it count in the next step.
        """
        self._groups.score(self._scorer.collect(None))

    def save(self) -> Plain:
        """Between steps: plain data, for JSON, with which a new collector goes on as this one."""
        return {
            "format": FORMAT,
            "num_groups": self._num_groups,
            "max_staleness": self._max_staleness,
            "dispatch": self._dispatch.save(),
            **self._groups.save(),
        }

    def restore(self, state: Plain) -> None:
        """Before the first step: go on where `state` was saved, with a prompt source restored to
        the same place. Raises StateError for another format, or settings it cannot go on with.
        """
        check_state(state, num_groups=self._num_groups, max_staleness=self._max_staleness)
        self._dispatch.restore(state["dispatch"])
        self._groups.restore(
            state,
            max_response_tokens=self._dispatch.max_response_tokens,
            num_engines=self._dispatch.num_engines,
        )

    # The phases of a step.

    def _begin(self, policy_version: int, may_open: bool) -> None:
        num_slots = round(self._over_sampling.factor * self._num_groups * self._group_size)
        waiting = self._groups.resume()
        self._dispatch.begin(num_slots=num_slots)
        self._version, self._may_open = policy_version, may_open
        # One-shot over-provisioning starts C samples and no more; a rejected or dropped group gives
        # its slots back.
        self._allowance = math.inf if self._refill else float(num_slots)
        self._stats = StepStats(
            num_slots=num_slots, policy_version=policy_version, clock=self._clock
        )
        self._groups.count(self._stats)
        self._allowance -= self._dispatch.send_home(waiting, limit=self._allowance)

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
            open_versions=self.buffer.open_versions(policy_version=self._version),
            ready_versions=self.buffer.ready_versions(),
            num_groups=self._num_groups,
            oldest_allowed=self._version - self._max_staleness,
            policy_version=self._version,
        )

    def _is_hopeless(self) -> bool:
        """Whether the bound on lost groups was reached; NoSignalError when nothing is ready."""
        if not is_reached(self._max_rejected_groups, self._stats):
            return False
        if not self.buffer.num_ready:
            raise nothing_to_train(self._stats, self._groups.last_failure)
        return True

    def _launch(self) -> None:
        """Hand out samples while engines have room, and keep ticks under way."""
        self._open_until(min(self._allowance, self._dispatch.room))
        self._allowance -= self._dispatch.submit(limit=self._allowance)
        self._dispatch.launch()

    def _open_until(self, num_samples: float) -> None:
        """Open groups, as far as may be, until so many samples wait to be sent."""
        while self._dispatch.num_waiting < num_samples and self._may_open_another():
            self._dispatch.add(self._groups.open(self._prompts.take()).rows)

    def _may_open_another(self) -> bool:
        is_full = self.buffer.num_open + self.buffer.num_ready >= self._max_alive
        has_enough = self.buffer.num_ready >= self._num_groups
        is_lost = is_reached(self._max_rejected_groups, self._stats)
        return self._may_open and not (is_full or has_enough or is_lost)

    def _advance(self) -> None:
        started = self._clock()
        ticks = self._dispatch.wait(self._tick_timeout_s)
        self._stats.waited_s += self._clock() - started
        for engine, tick in ticks:
            self._stats.add_tick(tick, engine=engine)
        completions = Completions.joined([tick.finished for _, tick in ticks])
        if completions:
            counts = [len(tick.finished) for _, tick in ticks]
            engines = np.repeat([engine for engine, _ in ticks], counts)
            returned = self._groups.extend(completions, self._stats, engines=engines)
            self._dispatch.free(returned)
            self._dispatch.learn(returned)
        self._groups.submit()
        self._take_scores(self._known_scores(wait_s=0.0))

    def _await_scores(self) -> bool:
        """Nothing is left to generate: wait for scores; False when there is nothing to wait for
        either.
        """
        if not self.buffer.has_unscored:
            return False
        started = self._clock()
        scores = self._known_scores(wait_s=1.0)
        self._stats.score_s += self._clock() - started
        self._stats.waited_s += self._clock() - started
        self._take_scores(scores)
        return True

    def _start_more(self) -> bool:
        """One-shot, and all is used up: start another group; False when there is none."""
        self._allowance += self._group_size
        self._open_until(1)
        return self._dispatch.num_waiting > 0

    def _abort_and_park(self, timeout_s: float) -> None:
        started = self._clock()
        completions, stalled = self._dispatch.abort(timeout_s)
        self._stats.abort_s = self._clock() - started
        self._stats.waited_s += self._stats.abort_s
        self._dispatch.learn(self._groups.extend(completions, self._stats))
        self._groups.park(stalled=stalled)
        self._groups.submit()
        self._stats.stop_s = self._clock() - started
        if stalled:
            raise EngineStalledError(
                f"engine {stalled[0]} did not give its samples back within "
                f"rollout.abort_timeout_s = {timeout_s:g} s; they are parked with the "
                "tokens they had before this step"
            )

    def _known_scores(self, *, wait_s: float) -> list[Score]:
        """What the scorer knows after `wait_s`; with `deterministic` all it was given."""
        return self._scorer.collect(None if self._deterministic else wait_s)

    def _take_scores(self, scores: Sequence[Score]) -> None:
        num_lost = self._groups.score(scores)
        if num_lost:
            self._allowance += self._group_size * num_lost
            self._groups.count(self._stats)
