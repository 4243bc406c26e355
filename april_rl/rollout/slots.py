"""Which engine computes which sample, and how many samples each engine holds."""

from __future__ import annotations

from collections.abc import Container, Sequence

from april_rl.rollout.least_loaded import LeastLoaded
from april_rl.types import SampleId

# By prompt id and index: the engine a sample is on, or was on before.
Home = dict[int, dict[int, int]]


class Slots:
    """C sample slots spread over the engines, and a short queue before each.

    A slot is a request an engine computes; a queued request waits in the engine until one falls
    free, so that a slot is filled between two engine steps, without asking the controller. The work
    outstanding on an engine is the tokens it has to prefill plus an expected response for each
    request. Nothing here looks at all engines: there may be hundreds, and thousands of decisions a
    second.
    """

    def __init__(self, *, num_engines: int, num_slots: int, lookahead: int, home: Home) -> None:
        """`num_slots` = C over all engines; `lookahead`: requests that may queue behind each
        engine's slots; `home`: the engine each sample was on before, kept up here. All engines
        are on offer.
        """
        base, rest = divmod(num_slots, num_engines)
        self._slots = [base + (engine < rest) for engine in range(num_engines)]
        self._limits = [slots + lookahead if slots else 0 for slots in self._slots]  # with queue
        self._prompts = {prompt_id: _Placed(engines) for prompt_id, engines in home.items()}
        self._in_flight = [0] * num_engines
        self._outstanding = [0.0] * num_engines
        self._home = home
        self._is_offered = [True] * num_engines
        self._free, self._queueing = LeastLoaded(), LeastLoaded()  # a slot free; room to queue
        self._changed = set(range(num_engines))  # engines that these two may not know as they are

    def slots(self, engine: int) -> int:
        """How many requests `engine` may compute together."""
        return self._slots[engine]

    def in_flight(self, engine: int) -> int:
        """Requests submitted to `engine` and not yet back."""
        return self._in_flight[engine]

    def is_held(self, sample_id: SampleId) -> bool:
        """Whether any engine has the sample."""
        prompt_id, index = sample_id
        placed = self._prompts.get(prompt_id)
        return placed is not None and index in placed.work

    def has(self, sample_id: SampleId, *, engine: int) -> bool:
        """Whether `engine` has the sample."""
        prompt_id, index = sample_id
        placed = self._prompts.get(prompt_id)
        return placed is not None and index in placed.work and placed.engines[index] == engine

    def held_by(self, engines: Container[int]) -> set[SampleId]:
        """The samples in flight on any of `engines`."""
        if not any(count for engine, count in enumerate(self._in_flight) if engine in engines):
            return set()
        return {
            SampleId(prompt_id, index)
            for prompt_id, placed in self._prompts.items()
            for index in placed.work
            if placed.engines[index] in engines
        }

    def offer(self, engine: int) -> None:
        """From now on `engine` may be chosen."""
        self._is_offered[engine] = True
        self._changed.add(engine)

    def withdraw(self, engine: int) -> None:
        """From now on `engine` is not chosen."""
        self._is_offered[engine] = False
        self._changed.add(engine)

    def put(self, sample_id: SampleId, *, work: float) -> int | None:
        """Count a request of `work` tokens as submitted; returns the engine chosen for it, None
        when none of those on offer has room.
        """
        prompt_id, index = sample_id
        placed = self._prompts.get(prompt_id)
        if placed is None:
            placed = self._prompts[prompt_id] = _Placed(self._home.setdefault(prompt_id, {}))
        assert index not in placed.work, sample_id
        engine = self._choose(placed.engines.get(index), placed.latest)
        if engine is None:
            return None
        placed.work[index] = work
        placed.engines[index] = placed.latest = engine
        self._in_flight[engine] += 1
        self._outstanding[engine] += work
        self._changed.add(engine)
        return engine

    def free(self, sample_id: SampleId) -> None:
        """Count a request as back, if it is not already."""
        prompt_id, index = sample_id
        placed = self._prompts[prompt_id]
        work = placed.work.pop(index, None)
        if work is None:
            return
        engine = placed.engines[index]
        self._in_flight[engine] -= 1
        self._outstanding[engine] -= work
        self._changed.add(engine)

    def _choose(self, home: int | None, siblings: int | None) -> int | None:
        """The engine for a sample; None when none of those on offer has room.

        An engine with a free slot before one where it would queue, the one where it was and may
        have its state before others, then the siblings', then the one with the least work
        outstanding.
        """
        for limits, engines in ((self._slots, self._free), (self._limits, self._queueing)):
            for known in (home, siblings):
                if known is not None and self._has_room(known, limits):
                    return known
            self._note_changes()
            least = engines.least()
            if least is not None:
                return least
        return None

    def _has_room(self, engine: int, limits: Sequence[int]) -> bool:
        """Whether `engine` is on offer with fewer requests than its limit."""
        return self._in_flight[engine] < limits[engine] and self._is_offered[engine]

    def _note_changes(self) -> None:
        """Have every engine among those with a free slot, with room to queue, or neither: one
        without slots (C < engines) never computes.
        """
        for engine in self._changed:
            self._free.discard(engine)
            self._queueing.discard(engine)
            if self._has_room(engine, self._slots):
                self._free.put(engine, self._outstanding[engine])
            elif self._has_room(engine, self._limits):
                self._queueing.put(engine, self._outstanding[engine])
        self._changed.clear()


class _Placed:
    """Where the samples of a prompt are."""

    __slots__ = ("engines", "latest", "work")

    def __init__(self, engines: dict[int, int]) -> None:
        self.engines = engines  # by index, the engine each sample is on, or was on before
        self.work: dict[int, float] = {}  # by index, of the samples in flight, in tokens
        self.latest: int | None = None  # the engine of the sample that was sent last
