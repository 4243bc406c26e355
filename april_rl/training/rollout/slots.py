"""Counts the samples of each engine, and chooses the engine of the next one."""

from __future__ import annotations


class Slots:
    """C sample slots spread over the engines, with a short queue behind each engine's slots.

    A slot is a request that an engine computes. A queued request waits in the engine until a slot
    becomes free, so that slots are refilled between engine steps without the controller. An
    engine's outstanding tokens are its prefills plus an expected response for each of its requests.
    """

    def __init__(self, *, num_engines: int, num_slots: int, queue_size: int) -> None:
        """`num_slots` = C over all engines; `queue_size` requests may wait in each engine. An
        engine without slots (C < engines) gets no requests. Initially every engine is on offer.
        """
        base, rest = divmod(num_slots, num_engines)
        self._slots = [base + (engine < rest) for engine in range(num_engines)]
        self._limits = [slots + queue_size if slots else 0 for slots in self._slots]
        self._in_flight = [0] * num_engines
        self._outstanding_tokens = [0.0] * num_engines
        self._offered = set(range(num_engines))

    def slots(self, engine: int) -> int:
        """Return how many requests `engine` may compute together."""
        return self._slots[engine]

    def in_flight(self, engine: int) -> int:
        return self._in_flight[engine]

    @property
    def room(self) -> int:
        """Return how many requests the engines on offer have room for."""
        return sum(self._limits[engine] - self._in_flight[engine] for engine in self._offered)

    def offer(self, engine: int) -> None:
        """Allow `choose` to return `engine` from now on."""
        self._offered.add(engine)

    def withdraw(self, engine: int) -> None:
        """Exclude `engine` from `choose` from now on."""
        self._offered.discard(engine)

    def add(self, engine: int, *, tokens: float) -> None:
        """Add a request to `engine`, with the tokens it has to compute."""
        self._in_flight[engine] += 1
        self._outstanding_tokens[engine] += tokens

    def remove(self, engine: int, *, tokens: float) -> None:
        """Remove a request that came back from `engine`, with its tokens."""
        self._in_flight[engine] -= 1
        self._outstanding_tokens[engine] -= tokens

    def has_slot(self, engine: int) -> bool:
        """Return whether `engine` is on offer and has a free slot."""
        return self._in_flight[engine] < self._slots[engine] and engine in self._offered

    def choose(self, *, last_engine: int | None, siblings: int | None) -> int | None:
        """Return the engine for a sample; None when no offered engine has room.

        A free slot is preferred to a queue; then the engine that had the sample last, which may
        keep its KV cache; then the engine of its siblings, which has their prompt; then the engine
        with the fewest outstanding tokens.
        """
        for preferred in (last_engine, siblings):
            if preferred is not None and self.has_slot(preferred):
                return preferred
        return min(
            (e for e in self._offered if self._in_flight[e] < self._limits[e]),
            key=lambda engine: (
                self._in_flight[engine] >= self._slots[engine],
                engine != last_engine,
                engine != siblings,
                self._outstanding_tokens[engine],
                engine,
            ),
            default=None,
        )
