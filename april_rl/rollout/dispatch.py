"""The requests of one step on their way to the engines and back."""

from __future__ import annotations

import math
from collections.abc import Set as AbstractSet

from april_rl.rollout.ledger import LedgerError
from april_rl.rollout.ports import Engines
from april_rl.rollout.seeds import request_seed
from april_rl.rollout.slots import Home, Slots
from april_rl.rollout.state import Plain
from april_rl.types import Completion, Request, Sample, SampleId, Tick

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
    """Owner of slots and ticks: hands requests to engines, and knows what has to come back.

    A sample goes to the engine it was on in the step before: its state may be there.
    """

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
        self._home: Home = {}
        self._expected_tokens = 1.0  # of a response: the running mean of finished ones
        self.begin(num_slots=0, unfinished=frozenset())

    def begin(self, *, num_slots: int, unfinished: AbstractSet[int]) -> None:
        """A new step with C = `num_slots` over all engines, which have nothing to do; samples of
        the prompts with the ids `unfinished` will come again.
        """
        num_engines = self._engines.num_engines
        # A quarter of the slots queues behind them: more than finishes within two ticks of any
        # length law whose mean is above eight ticks, and what does not get a slot costs nothing.
        lookahead = max(1, math.ceil(num_slots / num_engines) // 4)
        self._home = {id_: engines for id_, engines in self._home.items() if id_ in unfinished}
        self._slots = Slots(
            num_engines=num_engines, num_slots=num_slots, lookahead=lookahead, home=self._home
        )
        self._ticks = [0] * num_engines
        self._num_under_way = 0  # ticks, on all engines
        self._due: set[int] = set()  # engines that may need another tick
        self._submit: list[list[Request]] = [[] for _ in range(num_engines)]

    @property
    def is_idle(self) -> bool:
        """Whether no tick is under way."""
        return not self._num_under_way

    def has(self, sample_id: SampleId, *, engine: int) -> bool:
        """Whether `engine` is to give the sample back."""
        return self._slots.has(sample_id, engine=engine)

    def submit(self, sample: Sample) -> bool:
        """Send what the sample still needs with the next tick of an engine that has room; False
        when none has.
        """
        sample_id, num_tokens = sample.id, sample.num_tokens
        to_prefill = len(sample.prompt.token_ids) + num_tokens
        engine = self._slots.put(sample_id, work=to_prefill + self._expected_tokens)
        if engine is None:
            return False
        completions = sample.completions
        self._submit[engine].append(
            Request(
                sample_id=sample_id,
                prompt_token_ids=sample.prompt.token_ids,
                start=num_tokens,
                max_tokens=self.max_response_tokens - num_tokens,
                seed=request_seed(self._seed, sample_id, len(completions)),
                parts=tuple([completion.token_ids for completion in completions]),
            )
        )
        self._due.add(engine)
        return True

    def launch(self) -> None:
        """Have two ticks under way on every engine that has work."""
        for engine in sorted(self._due):
            if not self._slots.in_flight(engine):
                continue
            self._slots.withdraw(engine)
            while self._ticks[engine] < _TICKS_IN_FLIGHT:
                requests, self._submit[engine] = self._submit[engine], []
                slots = self._slots.slots(engine)
                self._engines.launch(engine, requests, slots=slots, max_steps=self._tick_steps)
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

    def free(self, sample_id: SampleId) -> None:
        """The sample came back."""
        self._slots.free(sample_id)

    def learn(self, num_tokens: int) -> None:
        """A finished response is so long: that counts for what to expect."""
        self._expected_tokens += 0.05 * (num_tokens - self._expected_tokens)

    def abort(self, timeout_s: float) -> tuple[list[Completion], list[int]]:
        """Stop everything: what comes back of what engines have, and the stalled engines.

        Raises LedgerError when an engine that did answer kept a sample.
        """
        completions, stalled = self._engines.abort(timeout_s)
        known = [c for c in completions if self._slots.is_held(c.sample_id)]
        for completion in known:  # of a sample there may be a late one, too
            self._slots.free(completion.sample_id)
        lost = self._slots.held_by(set(range(len(self._ticks))) - set(stalled))
        if lost:
            raise LedgerError(f"the engines gave back nothing for samples {sorted(lost)[:5]}")
        return known, stalled

    def save(self) -> Plain:
        """The expected length, and [prompt id, index, engine] of the samples of the last step."""
        home = [
            [prompt_id, index, engine]
            for prompt_id, engines in self._home.items()
            for index, engine in engines.items()
        ]
        return {"expected_tokens": self._expected_tokens, "home": home}

    def restore(self, state: Plain) -> None:
        """Expect what was saved, and send samples where they were."""
        self._expected_tokens = state["expected_tokens"]
        self._home = {}
        for prompt_id, index, engine in state["home"]:
            self._home.setdefault(prompt_id, {})[index] = engine
