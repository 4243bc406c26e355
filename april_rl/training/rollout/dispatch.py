"""The requests of one step: which engine gets which sample, and which ticks are under way."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from april_rl.training.rollout.open_group import OpenGroup, SampleState
from april_rl.training.rollout.ports import Engines
from april_rl.training.rollout.record import StepRecord
from april_rl.training.rollout.requests import Requests, Sampling
from april_rl.training.rollout.slots import Slots
from april_rl.training.rollout.ticks import Tick
from april_rl.types import Completion, SampleId

# Two ticks are under way on each engine: one runs while the controller prepares the next, so that
# engines do not wait for the controller.
_TICKS_IN_FLIGHT = 2

_SHORTEST_TICK, _USUAL_TICK = 8, 32
# Engines that the controller can serve for each step of a tick; more engines need longer ticks.
_ENGINES_PER_STEP = 8
_TICKS_PER_BUDGET = 64  # responses that use a part of the budget still have several ticks

# With fewer engines, one could run out of ticks while the controller waits for others.
_MANY_ENGINES = 64
_GATHERED_PART_OF_A_TICK, _LONGEST_GATHER_S = 1 / 4, 0.25

_MEAN_WEIGHT = 0.05  # weight of a new length in the running mean


def auto_tick_steps(*, num_engines: int, max_response_tokens: int, has_turns: bool) -> int:
    """Return the number of engine steps per tick.

    Each tick costs the engine a pause and the controller some work, so ticks are long where the
    budget allows, and longer with hundreds of engines. But when the last group is complete, engines
    still finish their current ticks, and their tokens are trained a step later. Slots need not wait
    for the end of a tick (`Slots`) as long as responses have several ticks, so ticks are short when
    the budget is small; and with `has_turns`, since an environment gets a turn when its tick ends.
    """
    wanted = max(_SHORTEST_TICK if has_turns else _USUAL_TICK, num_engines // _ENGINES_PER_STEP)
    return max(_SHORTEST_TICK, min(wanted, max_response_tokens // _TICKS_PER_BUDGET))


@dataclass(slots=True)
class ExpectedLength:
    """Running mean of the lengths of turns, in tokens; without an environment, of responses."""

    tokens: float = 1.0

    def observe(self, num_tokens: int) -> None:
        """Add the length of a turn that has just ended."""
        self.tokens += _MEAN_WEIGHT * (num_tokens - self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRules:
    """Settings of every request of a run."""

    tick_steps: int  # engine steps per tick
    max_response_tokens: int  # budget of a sample over all its requests
    seed: int  # seed of the run
    sampling: Sampling | None = None  # None: the sampling of the engines


class Dispatch:
    """Requests of one step: gets groups with waiting samples (`add`), returns ticks (`wait`)."""

    def __init__(
        self,
        engines: Engines,
        rules: RequestRules,
        expected: ExpectedLength,
        record: StepRecord,
    ) -> None:
        """Begin a step on idle engines; `record` has its C, and records what is sent."""
        self._engines, self._rules, self._expected = engines, rules, expected
        self._record = record
        num_engines, num_slots = engines.num_engines, record.num_slots
        # Each engine's queue has a quarter of its slots: more than finishes within two ticks if the
        # mean response is longer than eight ticks. A queued request costs nothing.
        queue_size = max(1, math.ceil(num_slots / num_engines) // 4)
        self.slots = Slots(num_engines=num_engines, num_slots=num_slots, queue_size=queue_size)
        self._waiting: deque[OpenGroup] = deque()  # groups with waiting samples, oldest first
        self.num_waiting = 0  # number of samples in them
        self._siblings: tuple[OpenGroup, int] | None = None  # the last assignment
        self._assigned: list[list[tuple[OpenGroup, int]]] = [[] for _ in range(num_engines)]
        self._due: set[int] = set()  # engines that may need another tick
        self._ticks = [0] * num_engines  # under way
        self._gather_s = 0.0

    @property
    def is_idle(self) -> bool:
        return not any(self._ticks)

    @property
    def num_engines(self) -> int:
        return self._engines.num_engines

    def add(self, group: OpenGroup) -> None:
        """Queue a group's waiting samples after the samples of earlier groups."""
        num_waiting = len(group.indices(SampleState.waiting))
        if num_waiting:
            self._waiting.append(group)
            self.num_waiting += num_waiting

    def add_turn(self, group: OpenGroup) -> None:
        """Queue a sample that waits for its next turn, before samples that have not begun."""
        self.num_waiting += 1
        self._waiting.appendleft(group)

    def return_to_engines(self, *, limit: float) -> int:
        """Assign waiting samples to the engines that had them last, while those have free slots;
        return how many.

        Called once at the beginning of a step, before `assign`: otherwise a sample whose engine is
        full could take the slot of a younger sample on that sample's engine. Considers at most
        `limit` samples, and no more than the engines have room for.
        """
        left, num_assigned = int(min(self.slots.room, limit)), 0
        for group in self._waiting:
            for index in group.indices(SampleState.waiting)[:left]:
                left -= 1
                engine = group.engines[index]
                if engine is not None and self.slots.has_slot(engine):
                    self._assign(group, index, engine)
                    num_assigned += 1
        self._siblings = None
        return num_assigned

    def assign(self, *, limit: float) -> int:
        """Assign at most `limit` samples, in order, to engines with room; return how many."""
        num_assigned = 0
        while self._waiting:
            group = self._waiting[0]
            for index in group.indices(SampleState.waiting):
                if num_assigned >= limit:
                    return num_assigned
                siblings = self._siblings
                engine = self.slots.choose(
                    last_engine=group.engines[index],
                    siblings=siblings[1] if siblings and siblings[0] is group else None,
                )
                if engine is None:
                    return num_assigned
                self._assign(group, index, engine)
                num_assigned += 1
            self._waiting.popleft()
        return num_assigned

    def _assign(self, group: OpenGroup, index: int, engine: int) -> None:
        tokens = group.assign(index, engine=engine, expected_tokens=self._expected.tokens)
        self.slots.add(engine, tokens=tokens)
        self._assigned[engine].append((group, index))
        self._due.add(engine)
        self.num_waiting -= 1
        self._siblings = group, engine

    def launch(self) -> None:
        """Launch ticks with the assigned samples: two on every engine that has requests."""
        due, self._due = sorted(self._due), set()
        for engine in due:
            if not self.slots.in_flight(engine):
                continue
            self.slots.withdraw(engine)
            while self._ticks[engine] < _TICKS_IN_FLIGHT:
                self._engines.launch(
                    engine,
                    self._requests(engine),
                    slots=self.slots.slots(engine),
                    max_steps=self._rules.tick_steps,
                )
                if samples := self._assigned[engine]:
                    self._record.send(
                        engine,
                        slots=self.slots.slots(engine),
                        sample_ids=[SampleId(group.prompt.id, index) for group, index in samples],
                    )
                self._assigned[engine] = []
                self._ticks[engine] += 1

    def _requests(self, engine: int) -> Requests:
        """Build the requests assigned to `engine`, oldest prompts first."""
        samples = sorted(self._assigned[engine], key=lambda each: (each[0].prompt.id, each[1]))
        budget = self._rules.max_response_tokens
        return Requests(
            self._rules.seed,
            prompt_ids=[group.prompt.id for group, _ in samples],
            indices=[index for _, index in samples],
            prompt_token_ids=[group.prompt.token_ids for group, _ in samples],
            max_tokens=[group.room(index, budget=budget) for group, index in samples],
            parts=[
                tuple(span.token_ids for span in group.spans[index]) for group, index in samples
            ],
            context_starts=[group.context_start(index) for group, index in samples],
            stops=[group.stop(index) for group, index in samples],
            num_routed=[group.num_routed(index) for group, index in samples],
            sampling=self._rules.sampling,
        )

    def wait(self, timeout_s: float) -> list[tuple[int, Tick]]:
        """Return the ticks that have ended since the last call, at least one, with their engines.

        With many engines others end soon after the first. Taking them together costs the controller
        less, and each engine has its next tick already.
        """
        ended = self._engines.wait(timeout_s, gather_s=self._gather_s)
        if ended and self._engines.num_engines >= _MANY_ENGINES:
            tick_s = fmean(tick.elapsed_s for _, tick in ended)
            self._gather_s = min(_GATHERED_PART_OF_A_TICK * tick_s, _LONGEST_GATHER_S)
        for engine, _ in ended:
            if self._ticks[engine]:  # otherwise it is a late tick from an earlier step
                self._ticks[engine] -= 1
            self.slots.offer(engine)
            self._due.add(engine)
        return ended

    def take_back(self, group: OpenGroup, completion: Completion) -> None:
        """Release the room of a request that came back, and learn from the length of its turn."""
        index = completion.sample_id.index
        engine = group.engines[index]
        assert engine is not None, completion.sample_id
        self.slots.remove(engine, tokens=group.outstanding_tokens[index])
        if completion.finish_reason is not None and not completion.is_failed:
            self._expected.observe(group.turn_tokens(index))

    def abort(self, timeout_s: float) -> tuple[Sequence[Completion], list[int]]:
        """Stop all engines; return what they give back, and the engines that did not return.
        Samples that were assigned but not launched (a launch failed) are parked, as no engine
        has them.
        """
        for assigned in self._assigned:
            for group, index in assigned:
                group.move(index, SampleState.parked)
            assigned.clear()
        return self._engines.abort(timeout_s)
