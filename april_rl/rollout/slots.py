"""Which engine computes which sample, and how many samples each engine holds."""

from __future__ import annotations

from collections.abc import Sequence

from april_rl.types import Request, SampleId


class Slots:
    """C sample slots spread over the engines, and a short queue before each.

    A slot is a request an engine computes; a queued request waits in the engine until one falls
    free, so that a slot is filled between two engine steps, without asking the controller. The work
    outstanding on an engine is the tokens it has to prefill plus an expected response for each
    request.
    """

    def __init__(self, *, num_engines: int, num_slots: int, lookahead: int) -> None:
        """`num_slots` = C over all engines; `lookahead`: requests that may queue behind each
        engine's slots.
        """
        base, rest = divmod(num_slots, num_engines)
        self._slots = [base + (engine < rest) for engine in range(num_engines)]
        self._lookahead = lookahead
        self._engine_of: dict[SampleId, int] = {}
        self._cost: dict[SampleId, float] = {}
        self._in_flight = [0] * num_engines
        self._outstanding = [0.0] * num_engines
        self._home: dict[int, int] = {}  # prompt id -> the engine of its siblings

    def slots(self, engine: int) -> int:
        """How many requests `engine` may compute together."""
        return self._slots[engine]

    def in_flight(self, engine: int) -> int:
        """Requests submitted to `engine` and not yet back."""
        return self._in_flight[engine]

    @property
    def num_in_flight(self) -> int:
        """Requests submitted and not yet back."""
        return len(self._engine_of)

    def engine_of(self, sample_id: SampleId) -> int | None:
        """The engine that has the sample; None when none has."""
        return self._engine_of.get(sample_id)

    def held_by_others(self, engines: Sequence[int]) -> list[SampleId]:
        """The samples in flight on any engine that is not among `engines`."""
        return [sample_id for sample_id, e in self._engine_of.items() if e not in engines]

    def choose(self, prompt_id: int) -> int | None:
        """The engine for the next sample of a prompt: its siblings' if there is room, else the
        least loaded with room.
        """
        home = self._home.get(prompt_id)
        if home is not None and self._room(home):
            return home
        free = [engine for engine in range(len(self._slots)) if self._room(engine)]
        return min(free, key=lambda engine: (self._outstanding[engine], engine), default=None)

    def put(self, request: Request, engine: int, *, expected_tokens: float) -> None:
        """Count a request as submitted to `engine`."""
        assert request.sample_id not in self._engine_of, request.sample_id
        cost = len(request.token_ids) + expected_tokens
        self._engine_of[request.sample_id] = engine
        self._cost[request.sample_id] = cost
        self._home[request.sample_id.prompt_id] = engine
        self._in_flight[engine] += 1
        self._outstanding[engine] += cost

    def free(self, sample_id: SampleId) -> None:
        """Count a request as back."""
        engine = self._engine_of.pop(sample_id)
        self._in_flight[engine] -= 1
        self._outstanding[engine] -= self._cost.pop(sample_id)

    def _room(self, engine: int) -> bool:
        return self._in_flight[engine] < self._slots[engine] + self._lookahead
