"""Which engine computes which sample, and how many samples each engine holds."""

from __future__ import annotations

from collections.abc import Container

from april_rl.rollout.least_loaded import LeastLoaded
from april_rl.types import SampleId


class Slots:
    """C sample slots spread over the engines, and a short queue before each.

    A slot is a request an engine computes; a queued request waits in the engine until one falls
    free, so that a slot is filled between two engine steps, without asking the controller. The work
    outstanding on an engine is the tokens it has to prefill plus an expected response for each
    request. Nothing here looks at all engines: there may be hundreds, and thousands of decisions a
    second.
    """

    def __init__(
        self, *, num_engines: int, num_slots: int, lookahead: int, home: dict[SampleId, int]
    ) -> None:
        """`num_slots` = C over all engines; `lookahead`: requests that may queue behind each
        engine's slots; `home`: the engine each sample was on before, kept up here. All engines
        are on offer.
        """
        base, rest = divmod(num_slots, num_engines)
        self._slots = [base + (engine < rest) for engine in range(num_engines)]
        self._lookahead = lookahead
        self._held: dict[SampleId, tuple[int, float]] = {}  # the engine, and the work in tokens
        self._in_flight = [0] * num_engines
        self._outstanding = [0.0] * num_engines
        self._home = home
        self._siblings: dict[int, int] = {}  # prompt id -> the engine of its last sample
        self._is_offered = [True] * num_engines
        self._free, self._queueing = LeastLoaded(), LeastLoaded()  # a slot free; room to queue
        for engine in range(num_engines):
            self._place(engine)

    def slots(self, engine: int) -> int:
        """How many requests `engine` may compute together."""
        return self._slots[engine]

    def in_flight(self, engine: int) -> int:
        """Requests submitted to `engine` and not yet back."""
        return self._in_flight[engine]

    def engine_of(self, sample_id: SampleId) -> int | None:
        """The engine that has the sample; None when none has."""
        held = self._held.get(sample_id)
        return held[0] if held else None

    def held_by(self, engines: Container[int]) -> set[SampleId]:
        """The samples in flight on any of `engines`."""
        return {sample_id for sample_id, (e, _) in self._held.items() if e in engines}

    def offer(self, engine: int) -> None:
        """From now on `engine` may be chosen."""
        self._is_offered[engine] = True
        self._place(engine)

    def withdraw(self, engine: int) -> None:
        """From now on `engine` is not chosen."""
        self._is_offered[engine] = False
        self._free.discard(engine)
        self._queueing.discard(engine)

    def choose(self, sample_id: SampleId) -> int | None:
        """The engine for a sample; None when none of those on offer has room.

        An engine with a free slot before one where it would queue, the one where it was and may
        have its state before others, then the siblings', then the one with the least work
        outstanding.
        """
        home = self._home.get(sample_id)
        siblings = self._siblings.get(sample_id.prompt_id)
        for engines in (self._free, self._queueing):
            if home in engines.loads:
                return home
            if siblings in engines.loads:
                return siblings
            least = engines.least()
            if least is not None:
                return least
        return None

    def put(self, sample_id: SampleId, engine: int, *, cost: float) -> None:
        """Count a request as submitted to `engine`, where it is work of `cost` tokens."""
        assert sample_id not in self._held, sample_id
        self._held[sample_id] = engine, cost
        self._home[sample_id] = self._siblings[sample_id.prompt_id] = engine
        self._in_flight[engine] += 1
        self._outstanding[engine] += cost
        self._place(engine)

    def free(self, sample_id: SampleId) -> None:
        """Count a request as back."""
        engine, cost = self._held.pop(sample_id)
        self._in_flight[engine] -= 1
        self._outstanding[engine] -= cost
        self._place(engine)

    def _place(self, engine: int) -> None:
        """Among those with a free slot, with room to queue, or neither: an engine without slots (C
        < engines) never computes.
        """
        if not self._is_offered[engine]:
            return
        slots, in_flight = self._slots[engine], self._in_flight[engine]
        if in_flight < slots:
            self._free.put(engine, self._outstanding[engine])
            self._queueing.discard(engine)
            return
        self._free.discard(engine)
        if slots > 0 and in_flight < slots + self._lookahead:
            self._queueing.put(engine, self._outstanding[engine])
        else:
            self._queueing.discard(engine)
