"""The only place where the controller waits for replies of other processes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

_LONGEST_WAIT_S = 1.0  # longest pause between two checks of processes that may hang

_Reply_co = TypeVar("_Reply_co", covariant=True)


class Party(Protocol[_Reply_co]):
    """A group of processes of one kind, whose replies arrive through a mailbox."""

    @property
    def is_waiting(self) -> bool:
        """Return whether a reply is under way."""

    @property
    def has_known(self) -> bool:
        """Return whether there is a reply that has not been taken."""

    def check(self) -> None:
        """Act on hung processes."""

    def take(self) -> Sequence[_Reply_co]:
        """Return the replies known by now, in the order of the questions."""


class Mailbox:
    """A queue of functions from other threads, which the controller's thread calls."""

    def __init__(self) -> None:
        self._events: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def put(self, event: Callable[[], None]) -> None:
        """Make the next `collect` call `event`; any thread may do this."""
        self._events.put(event)

    def collect(
        self,
        parties: Sequence[Party[_Reply_co]],
        timeout_s: float | None,
        look: Callable[[], None] = lambda: None,
    ) -> list[_Reply_co]:
        """Return what each party knows, party by party.

        With `timeout_s` 0 return the replies that are there now; with a positive one wait that long
        for at least one reply; with None wait until no party waits any more. `look` is called
        before each wait of at most a second; what it raises loses no reply.
        """
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._advance(parties, wait_s=0.0)
        while any(party.is_waiting for party in parties):
            left_s = deadline_s - time.monotonic()
            has_known = any(party.has_known for party in parties)
            if left_s <= 0 or (has_known and timeout_s is not None):
                break
            look()
            self._advance(parties, wait_s=min(left_s, _LONGEST_WAIT_S))
        return [reply for party in parties for reply in party.take()]

    def _advance(self, parties: Sequence[Party[_Reply_co]], *, wait_s: float) -> None:
        """Wait up to `wait_s` for an event, call all that have arrived, and check the processes."""
        try:
            (self._events.get(timeout=wait_s) if wait_s else self._events.get_nowait())()
            while True:
                self._events.get_nowait()()
        except Empty:
            pass
        for party in parties:
            party.check()
