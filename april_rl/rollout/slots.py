"""How many samples each engine holds, and which one gets the next."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from april_rl.rollout.least_loaded import LeastLoaded
from april_rl.rollout.sample_table import NOBODY, rank_within, view


class _All(NamedTuple):
    """The columns of `Slots` as numpy has them: the same memory [engines]."""

    slots: NDArray[np.intc]
    limits: NDArray[np.intc]
    in_flight: NDArray[np.intc]
    outstanding: NDArray[np.float64]
    is_offered: NDArray[np.bool_]
    is_open: NDArray[np.bool_]


class Slots:
    """C sample slots spread over the engines, and a short queue before each.

    A slot is a request an engine computes; a queued request waits in the engine until one falls
    free, so that a slot is filled between two engine steps, without asking the controller. The work
    outstanding on an engine is the tokens it has to prefill plus an expected response for each
    request. A decision looks at few engines, for there may be hundreds and thousands of decisions a
    second; numpy looks at all, once for all ticks that are taken in together.
    """

    def __init__(self, *, num_engines: int, num_slots: int, lookahead: int) -> None:
        """`num_slots` = C over all engines; `lookahead`: requests that may queue behind each
        engine's slots. All engines are on offer.
        """
        base, rest = divmod(num_slots, num_engines)
        self._slots = array("i", [base + (engine < rest) for engine in range(num_engines)])
        # With the queue; one without slots (C < engines) never computes, and has none.
        self._limits = array("i", [slots + lookahead if slots else 0 for slots in self._slots])
        self._in_flight = array("i", [0]) * num_engines
        self._outstanding = array("d", [0.0]) * num_engines
        self._is_offered = bytearray(b"\1") * num_engines
        self._is_open = bytearray(slots > 0 for slots in self._slots)  # and is on offer
        self._all = _All(
            slots=view(self._slots),
            limits=view(self._limits),
            in_flight=view(self._in_flight),
            outstanding=view(self._outstanding),
            is_offered=view(self._is_offered),
            is_open=view(self._is_open),
        )
        self._loads = LeastLoaded()  # of the open ones; a free slot counts before a queue
        self._changed = set(range(num_engines))  # engines that it may not know as they are

    @property
    def has_room(self) -> bool:
        """Whether `choose` finds an engine."""
        return 1 in self._is_open

    @property
    def room(self) -> int:
        """Requests that the engines on offer have room for."""
        free = self._all.limits - self._all.in_flight
        return int(free[self._all.is_open].sum())

    @property
    def has_slot(self) -> bool:
        """Whether an engine on offer has a free slot."""
        is_free = self._all.in_flight < self._all.slots
        return bool((is_free & self._all.is_offered).any())

    def slots(self, engine: int) -> int:
        """How many requests `engine` may compute together."""
        return self._slots[engine]

    def in_flight(self, engine: int) -> int:
        """Requests submitted to `engine` and not yet back."""
        return self._in_flight[engine]

    def offer(self, engines: Sequence[int]) -> None:
        """From now on these may be chosen."""
        self._all.is_offered[engines] = True
        self._note(engines)

    def withdraw(self, engines: Sequence[int]) -> None:
        """From now on these are not chosen."""
        self._all.is_offered[engines] = False
        self._note(engines)

    def put(self, engine: int, *, count: int, work: float) -> None:
        """`count` requests were submitted to `engine`, of `work` tokens in all."""
        self._in_flight[engine] += count
        self._outstanding[engine] += work
        has_room = self._in_flight[engine] < self._limits[engine]
        self._is_open[engine] = has_room and self._is_offered[engine]
        self._changed.add(engine)

    def put_all(self, counts: NDArray[np.int64], work: NDArray[np.float64]) -> None:
        """So many requests were submitted to each engine, of so many tokens; below 0: they are back
        [engines].
        """
        self._all.in_flight[:] += counts
        self._all.outstanding[:] += work
        self._note(np.flatnonzero(counts).tolist())

    def at_home(self, homes: NDArray[np.intc], *, limit: float) -> NDArray[np.bool_]:
        """Which samples go where they were before as a step begins, all engines empty and on offer:
        of the first that there is room for, at most `limit`, as many of a home as it has slots; and
        when that fills all slots, as many as it has room. So one may queue at home while a younger
        one has a slot at its own: it is next there. `homes` of all that wait, the oldest first, or
        NOBODY [n].
        """
        most = min(sum(self._limits), limit, len(homes))
        has_home = np.flatnonzero(homes[: int(most)] != NOBODY)
        home = homes[has_home]
        room, limits = np.array(self._slots), np.array(self._limits)
        if (np.bincount(home, minlength=len(room)) >= room).all():
            room = limits
        goes = np.zeros(len(homes), np.bool_)
        goes[has_home] = rank_within(home) < room[home]
        return goes

    def choose(self, homes: Sequence[int], siblings: int) -> tuple[int, int] | None:
        """The engine for the first of some samples of a group, and how many of them it gets when
        they are put one after another into its slots, or into its queue; None when none of the
        engines on offer has room.

        An engine with a free slot before one where they would queue, the one where the sample was
        and may have its state before others, then its siblings', then the one with the least work
        outstanding. `homes`: the engine each was on before; `siblings`: the one that a sample of
        the group was sent to last; NOBODY when there is none.
        """
        if not self.has_room:
            return None
        engine = homes[0]
        if engine == NOBODY or not self._has_slot(engine):
            engine = self._choose_other(engine, siblings)
        takes, limits = self._has_slot, self._slots
        if not takes(engine):
            takes, limits = self._has_room, self._limits
        count = 1
        for home in homes[1 : limits[engine] - self._in_flight[engine]]:
            if home not in (engine, NOBODY) and takes(home):
                break
            count += 1
        return engine, count

    def queues(self, count: int) -> NDArray[np.int64]:
        """Where at most `count` samples queue that no engine had, when none on offer has a free
        slot: behind the least work first, as many as there is room for.
        """
        engines = np.flatnonzero(self._all.is_open)
        engines = engines[np.argsort(self._all.outstanding[engines], kind="stable")]
        room = self._all.limits[engines] - self._all.in_flight[engines]
        return np.repeat(engines, room)[:count]

    def _choose_other(self, home: int, siblings: int) -> int:
        """The engine for a sample whose home has no free slot."""
        if siblings != NOBODY and self._has_slot(siblings):
            return siblings
        least = self._least_loaded()
        if not self._has_slot(least):
            for engine in (home, siblings):
                if engine != NOBODY and self._is_open[engine]:
                    return engine
        return least

    def _has_slot(self, engine: int) -> bool:
        """Whether `engine` is on offer with fewer requests than slots."""
        return self._in_flight[engine] < self._slots[engine] and bool(self._is_offered[engine])

    def _has_room(self, engine: int) -> bool:
        """Whether `engine` is on offer with a free slot, or room in its queue."""
        return bool(self._is_open[engine])

    def _note(self, engines: Sequence[int]) -> None:
        """Know which engines have room, now that something of these has changed."""
        has_room = self._all.in_flight < self._all.limits
        np.logical_and(has_room, self._all.is_offered, out=self._all.is_open)
        self._changed.update(engines)

    def _least_loaded(self) -> int:
        """Of the engines with room."""
        for engine in self._changed:
            if self._is_open[engine]:
                is_full = self._in_flight[engine] >= self._slots[engine]
                self._loads.put(engine, (is_full, self._outstanding[engine]))
            else:
                self._loads.discard(engine)
        self._changed.clear()
        least = self._loads.least()
        assert least is not None
        return least
