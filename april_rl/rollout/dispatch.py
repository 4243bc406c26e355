"""The requests of one step on their way to the engines and back."""

from __future__ import annotations

import math
from collections.abc import Iterable

from april_rl.rollout.open_group import OpenGroup
from april_rl.rollout.ports import Engines
from april_rl.rollout.siblings import Siblings
from april_rl.rollout.slots import Slots
from april_rl.rollout.state import Plain
from april_rl.types import Completion, Tick

# The controller is asked at most as often as by 64 engines every 8 steps.
_SHORTEST_TICK, _ENGINES_PER_STEP = 8, 8
_TICKS_PER_BUDGET = 64  # most responses have several, though they take a part of it only

# Ticks under way per engine: one runs while the controller prepares the next, so engines never wait
# for it.
_TICKS_IN_FLIGHT = 2


def auto_tick_steps(*, num_engines: int, max_response_tokens: int) -> int:
    """Engine steps of a tick with so many engines.

    Each tick costs the controller the same, so with hundreds of engines they are longer. The price
    is the stop: after the last group wanted, engines go on until the ticks under way end, with
    tokens that are trained a step later. Slots do not wait for it (`Slots`) as long as responses
    have several ticks, so those of a small budget keep short ones.
    """
    longest = min(num_engines // _ENGINES_PER_STEP, max_response_tokens // _TICKS_PER_BUDGET)
    return max(_SHORTEST_TICK, longest)


class Dispatch:
    """Owner of slots and ticks: hands requests to engines, where they have room."""

    def __init__(
        self,
        engines: Engines,
        *,
        tick_steps: int,
        max_response_tokens: int,
        seed: int,
    ) -> None:
        """`tick_steps`: engine steps of a tick; `max_response_tokens`: budget of a sample over all
        its requests; `seed` of the run.
        """
        self._engines, self._tick_steps = engines, tick_steps
        self.max_response_tokens, self._seed = max_response_tokens, seed
        self._expected_tokens = 1.0  # of a response: the running mean of finished ones
        self.begin(num_slots=0)

    @property
    def num_engines(self) -> int:
        """How many there are."""
        return self._engines.num_engines

    def begin(self, *, num_slots: int) -> None:
        """A new step with C = `num_slots` over all engines, which have nothing to do."""
        num_engines = self._engines.num_engines
        # A quarter of the slots queues behind them: more than finishes within two ticks of any
        # length law whose mean is above eight ticks, and what does not get a slot costs nothing.
        lookahead = max(1, math.ceil(num_slots / num_engines) // 4)
        self._slots = Slots(num_engines=num_engines, num_slots=num_slots, lookahead=lookahead)
        self._ticks = [0] * num_engines
        self._num_under_way = 0  # ticks, on all engines
        self._due: set[int] = set()  # engines that may need another tick
        self._submit: list[list[Siblings]] = [[] for _ in range(num_engines)]

    @property
    def is_idle(self) -> bool:
        """Whether no tick is under way."""
        return not self._num_under_way

    @property
    def has_room(self) -> bool:
        """Whether `submit` would send something."""
        return self._slots.has_room

    def submit(self, group: OpenGroup, *, limit: float) -> int:
        """Send what the first waiting samples of a group, at most `limit`, still need with the next
        tick of an engine that has room; returns how many, 0 when none has.

        A sample goes to the engine it was on before: its state may be there.
        """
        homes = group.homes
        most = len(group.waiting) if limit > len(group.waiting) else int(limit)
        chosen = self._slots.choose([homes[i] for i in group.waiting[:most]], group.latest)
        if chosen is None:
            return 0
        engine, count = chosen
        sent, work = group.send(count, engine=engine, expected_tokens=self._expected_tokens)
        self._slots.put(engine, count=count, work=work)
        prompt, completions = group.prompt, group.completions
        self._submit[engine].append(
            Siblings(
                prompt_id=prompt.id,
                prompt_token_ids=prompt.token_ids,
                indices=sent,
                parts=[tuple([part.token_ids for part in completions[index]]) for index in sent],
                max_response_tokens=self.max_response_tokens,
                run_seed=self._seed,
            )
        )
        self._due.add(engine)
        return count

    def launch(self) -> None:
        """Have two ticks under way on every engine that has work."""
        for engine in sorted(self._due):
            if not self._slots.in_flight(engine):
                continue
            self._slots.withdraw(engine)
            while self._ticks[engine] < _TICKS_IN_FLIGHT:
                submit, self._submit[engine] = self._submit[engine], []
                slots = self._slots.slots(engine)
                self._engines.launch(engine, submit, slots=slots, max_steps=self._tick_steps)
                self._ticks[engine] += 1
                self._num_under_way += 1
        self._due.clear()

    def wait(self, timeout_s: float) -> list[tuple[int, Tick]]:
        """The ticks that have ended since the last call, at least one, with their engines."""
        ended = self._engines.wait(timeout_s)
        for engine, _ in ended:
            is_known = self._ticks[engine] > 0  # not a late one, of an earlier step
            self._ticks[engine] -= is_known
            self._num_under_way -= is_known
            self._slots.offer(engine)
            self._due.add(engine)
        return ended

    def free(self, engine: int, *, count: int, work: float) -> None:
        """`count` samples came back from `engine`, which had `work` tokens to compute for them."""
        self._slots.free(engine, count=count, work=work)

    def learn(self, completions: Iterable[Completion]) -> None:
        """The lengths of responses that are finished by these count for what to expect."""
        for completion in completions:
            if completion.finish_reason is not None:
                num_tokens = completion.start + len(completion.token_ids)
                self._expected_tokens += 0.05 * (num_tokens - self._expected_tokens)

    def abort(self, timeout_s: float) -> tuple[list[Completion], list[int]]:
        """Stop everything: what comes back of what engines have, and the stalled engines."""
        return self._engines.abort(timeout_s)

    def save(self) -> Plain:
        """The expected length of a response."""
        return {"expected_tokens": self._expected_tokens}

    def restore(self, state: Plain) -> None:
        """Expect what was saved."""
        self._expected_tokens = state["expected_tokens"]
