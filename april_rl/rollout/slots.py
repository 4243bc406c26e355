"""Which engine computes which sample, and how many samples each engine holds."""

from __future__ import annotations

from collections.abc import Container, Iterable

from april_rl.types import Request, SampleId


class Slots:
    """C sample slots spread over the engines, and a short queue before each.

    A slot is a request an engine computes; a queued request waits in the engine until one falls
    free, so that a slot is filled between two engine steps, without asking the controller. The work
    outstanding on an engine is the tokens it has to prefill plus an expected response for each
    request.
    """

    def __init__(
        self, *, num_engines: int, num_slots: int, lookahead: int, home: dict[SampleId, int]
    ) -> None:
        """`num_slots` = C over all engines; `lookahead`: requests that may queue behind each
        engine's slots; `home`: the engine each sample was on before, kept up here.
        """
        base, rest = divmod(num_slots, num_engines)
        self._slots = [base + (engine < rest) for engine in range(num_engines)]
        self._lookahead = lookahead
        self._engine_of: dict[SampleId, int] = {}
        self._cost: dict[SampleId, float] = {}
        self._in_flight = [0] * num_engines
        self._outstanding = [0.0] * num_engines
        self._home = home
        self._siblings: dict[int, int] = {}  # prompt id -> the engine of its last sample

    def slots(self, engine: int) -> int:
        """How many requests `engine` may compute together."""
        return self._slots[engine]

    def in_flight(self, engine: int) -> int:
        """Requests submitted to `engine` and not yet back."""
        return self._in_flight[engine]

    def engine_of(self, sample_id: SampleId) -> int | None:
        """The engine that has the sample; None when none has."""
        return self._engine_of.get(sample_id)

    def held_by(self, engines: Container[int]) -> set[SampleId]:
        """The samples in flight on any of `engines`."""
        return {sample_id for sample_id, e in self._engine_of.items() if e in engines}

    def choose(self, sample_id: SampleId, *, among: Iterable[int]) -> int | None:
        """The engine for a sample; None when none of `among` has room.

        An engine with a free slot before one where it would queue, the one where it was and may
        have its state before others, then the siblings', then the one with the least work
        outstanding.
        """
        home = self._home.get(sample_id)
        siblings = self._siblings.get(sample_id.prompt_id)
        return min(
            (engine for engine in among if self._has_room(engine)),
            key=lambda engine: (
                self._in_flight[engine] >= self._slots[engine],
                engine != home,
                engine != siblings,
                self._outstanding[engine],
                engine,
            ),
            default=None,
        )

    def put(self, request: Request, engine: int, *, expected_tokens: float) -> None:
        """Count a request as submitted to `engine`."""
        assert request.sample_id not in self._engine_of, request.sample_id
        cost = len(request.token_ids) + expected_tokens
        self._engine_of[request.sample_id] = engine
        self._cost[request.sample_id] = cost
        self._home[request.sample_id] = self._siblings[request.sample_id.prompt_id] = engine
        self._in_flight[engine] += 1
        self._outstanding[engine] += cost

    def free(self, sample_id: SampleId) -> None:
        """Count a request as back."""
        engine = self._engine_of.pop(sample_id)
        self._in_flight[engine] -= 1
        self._outstanding[engine] -= self._cost.pop(sample_id)

    def _has_room(self, engine: int) -> bool:
        """Whether it may get one more; an engine without slots (C < engines) never computes."""
        slots = self._slots[engine]
        return slots > 0 and self._in_flight[engine] < slots + self._lookahead
