"""The requests of one step on their way to the engines and back."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from april_rl.rollout.ports import Engines
from april_rl.rollout.requests import Requests
from april_rl.rollout.returned import Returned
from april_rl.rollout.sample_table import NOBODY, SampleTable, view
from april_rl.rollout.slots import Slots
from april_rl.rollout.state import Plain
from april_rl.rollout.tick_length import gather_s
from april_rl.ticks import Completions, Tick

# Ticks under way per engine: one runs while the controller prepares the next, so engines never wait
# for it.
_TICKS_IN_FLIGHT = 2


class Dispatch:
    """Owner of slots and ticks: hands requests to engines, where they have room."""

    def __init__(
        self,
        engines: Engines,
        table: SampleTable,
        *,
        tick_steps: int,
        max_response_tokens: int,
        seed: int,
    ) -> None:
        """`table` of the samples; `tick_steps`: engine steps of a tick; `max_response_tokens`:
        budget of a sample over all its requests; `seed` of the run.
        """
        self._engines, self._table, self._tick_steps = engines, table, tick_steps
        self.max_response_tokens, self._seed = max_response_tokens, seed
        self._nothing = Requests(max_response_tokens, seed)
        self._gather_s = 0.0
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
        self._waiting: deque[list[int]] = deque()  # rows to be sent, a list for each group
        self._num_waiting = 0  # samples in it
        self._due: set[int] = set()  # engines that may need another tick
        self._pending: list[list[int]] = [[] for _ in range(num_engines)]  # rows, to be launched
        self._went_home = False  # samples did, and nothing was launched since
        self._latest = (-1, NOBODY)  # prompt of the group that was sent last, and its engine

    @property
    def is_idle(self) -> bool:
        """Whether no tick is under way."""
        return not self._num_under_way

    @property
    def room(self) -> int:
        """How many samples `submit` would send."""
        return self._slots.room

    @property
    def num_waiting(self) -> int:
        """Samples that `submit` has not sent yet."""
        return self._num_waiting

    def send_home(self, rows: NDArray[np.int64], *, limit: float) -> int:
        """Send samples, at most `limit`, to the engines that had them, as far as `Slots.at_home`
        says so; returns how many. The others wait.

        For all of them at once, as a step begins: `submit` would ask for one after another.
        """
        homes = view(self._table.homes)[rows]
        goes = self._slots.at_home(homes, limit=limit)
        self._put(rows[goes], homes[goes])
        self._went_home = bool(goes.any())
        self._waiting.extend(self._table.by_group(rows[~goes]))
        num_sent = int(goes.sum())
        self._num_waiting += len(rows) - num_sent
        return num_sent

    def add(self, rows: Sequence[int]) -> None:
        """The samples of a new group wait behind the others."""
        self._waiting.append([*rows])
        self._num_waiting += len(rows)

    def submit(self, *, limit: float) -> int:
        """Send what the first samples of those that wait still need, at most `limit`, with the next
        tick of engines that have room; returns how many.

        A sample goes to the engine it was on before: its state may be there.
        """
        slots, num_sent = self._slots, 0
        has_slot = slots.has_slot
        while self._waiting and num_sent < limit and slots.has_room:
            if has_slot or not self._are_new(self._waiting[0]):
                count, has_slot = self._submit_first(limit - num_sent)
            else:
                count = self._queue_new(limit - num_sent)
            num_sent += count
        self._num_waiting -= num_sent
        return num_sent

    def _submit_first(self, limit: float) -> tuple[int, bool]:
        """Send samples of the first group to one engine: how many, and whether they have slots; if
        not, there was none on offer.
        """
        table, rows = self._table, self._waiting[0]
        place = rows[0] // table.group_size
        prompt_id = table.prompt_ids[place]
        siblings = self._latest[1] if self._latest[0] == prompt_id else NOBODY
        may_go = rows if len(rows) <= limit else rows[: int(limit)]
        chosen = self._slots.choose([table.homes[row] for row in may_go], siblings)
        assert chosen is not None
        engine, count = chosen
        has_slot = self._slots.in_flight(engine) < self._slots.slots(engine)
        if count == len(rows):
            self._waiting.popleft()
        else:
            rows, self._waiting[0] = rows[:count], rows[count:]
        work = count * (table.prompt_tokens[place] + self._expected_tokens)
        work += sum([table.lengths[row] for row in rows])
        self._latest = prompt_id, engine
        self._slots.put(engine, count=count, work=work)
        self._pending[engine] += rows
        self._due.add(engine)
        return count, has_slot

    def _queue_new(self, limit: float) -> int:
        """Send samples that no engine had to queue; returns how many. Of many groups at once, for
        with hundreds of engines there are always some that have room again.
        """
        waiting, rows, most = self._waiting, list[int](), int(min(self._slots.room, limit))
        while waiting and len(rows) < most and self._are_new(waiting[0]):
            rows += waiting.popleft()
        if len(rows) > most:
            waiting.appendleft(rows[most:])
            del rows[most:]
        engines = self._slots.queues(len(rows))
        self._put(np.array(rows), engines)
        place = rows[-1] // self._table.group_size
        self._latest = self._table.prompt_ids[place], int(engines[-1])
        return len(rows)

    def _are_new(self, rows: Sequence[int]) -> bool:
        """Whether no engine had any of these samples."""
        homes = self._table.homes
        return {homes[row] for row in rows} == {NOBODY}

    def _put(self, rows: NDArray[np.int64], engines: NDArray[np.integer[Any]]) -> None:
        """Have these samples wait for the next tick of their engines [n each]."""
        counts, work = self._totals(engines, self._work(rows))
        self._slots.put_all(counts, work)
        ordered = rows[np.argsort(engines, kind="stable")].tolist()
        ends, chosen = counts.cumsum().tolist(), np.flatnonzero(counts).tolist()
        for engine in chosen:
            self._pending[engine] += ordered[ends[engine] - counts[engine] : ends[engine]]
        self._due.update(chosen)

    def launch(self) -> None:
        """Have two ticks under way on every engine that has work."""
        due = [engine for engine in sorted(self._due) if self._slots.in_flight(engine)]
        self._due.clear()
        self._slots.withdraw(due)
        due = [engine for engine in due if self._ticks[engine] < _TICKS_IN_FLIGHT]
        for engine, submit in zip(due, self._hand_over(due), strict=True):
            while self._ticks[engine] < _TICKS_IN_FLIGHT:
                slots = self._slots.slots(engine)
                self._engines.launch(engine, submit, slots=slots, max_steps=self._tick_steps)
                submit, self._pending[engine] = self._nothing, []
                self._ticks[engine] += 1
                self._num_under_way += 1

    def _hand_over(self, engines: Sequence[int]) -> list[Requests]:
        """What each of these engines is told of the samples that are pending for it, which are its
        own from now on; for all of them at once.
        """
        table, pending = self._table, [self._pending[engine] for engine in engines]
        counts = [len(rows) for rows in pending]
        if not any(counts):
            return [self._nothing] * len(engines)
        rows = np.fromiter(chain.from_iterable(pending), np.int64, sum(counts))
        homes = np.repeat(np.array(engines, np.intc), np.array(counts, np.intp))
        places = rows // table.group_size
        if self._went_home:  # others joined them: now those of the oldest prompts first
            self._went_home = False
            # By engine, prompt and index in one number: a fourth of the time of three keys.
            numbers = table.in_line(rows)
            order = np.argsort(homes * (numbers.max() + 1) + numbers)
            rows, places = rows[order], places[order]
        view(table.homes)[rows] = homes
        view(table.work)[rows] = self._work(rows)
        prompt_ids = view(table.prompt_ids)[places].tolist()
        indices = (rows - places * table.group_size).tolist()
        prompts = [table.prompt_token_ids[place] for place in places.tolist()]
        parts = [table.parts[row] for row in rows.tolist()]
        return [
            Requests(
                self.max_response_tokens,
                self._seed,
                prompt_ids[start:end],
                indices[start:end],
                prompts[start:end],
                parts[start:end],
            )
            for start, end in pairwise(accumulate(counts, initial=0))
        ]

    def _work(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Tokens that an engine is expected to compute for each of these samples [n]."""
        table = self._table
        prompt_tokens = view(table.prompt_tokens)[rows // table.group_size]
        work: NDArray[np.float64] = (
            prompt_tokens + view(table.lengths)[rows] + self._expected_tokens
        )
        return work

    def wait(self, timeout_s: float) -> list[tuple[int, Tick]]:
        """The ticks that have ended since the last call, at least one, with their engines."""
        ended = self._engines.wait(timeout_s, gather_s=self._gather_s)
        if ended:
            tick_s = fmean([tick.elapsed_s for _, tick in ended])
            self._gather_s = gather_s(tick_s, num_engines=self.num_engines)
        for engine, _ in ended:
            is_known = self._ticks[engine] > 0  # not a late one, of an earlier step
            self._ticks[engine] -= is_known
            self._num_under_way -= is_known
        engines = [engine for engine, _ in ended]
        self._slots.offer(engines)
        self._due.update(engines)
        return ended

    def free(self, returned: Returned) -> None:
        """These requests are back from their engines."""
        counts, work = self._totals(returned.homes, returned.work)
        self._slots.put_all(-counts, -work)

    def _totals(
        self, engines: NDArray[np.integer[Any]], work: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """How many of these samples each engine has, and the tokens it has to compute for them."""
        counts = np.bincount(engines, minlength=self.num_engines)
        total = np.bincount(engines, weights=work, minlength=self.num_engines)
        return counts, total.astype(np.float64)

    def learn(self, returned: Returned) -> None:
        """The lengths of responses that are finished by these count for what to expect."""
        for num_tokens in returned.lengths[returned.is_finished].tolist():
            self._expected_tokens += 0.05 * (num_tokens - self._expected_tokens)

    def abort(self, timeout_s: float) -> tuple[Completions, list[int]]:
        """Stop everything: what comes back of what engines have, and the stalled engines. What was
        not launched yet no engine has.
        """
        for rows in self._pending:  # some when a launch failed
            view(self._table.work)[rows] = 0.0
            rows.clear()
        return self._engines.abort(timeout_s)

    def save(self) -> Plain:
        """The expected length of a response."""
        return {"expected_tokens": self._expected_tokens}

    def restore(self, state: Plain) -> None:
        """Expect what was saved."""
        self._expected_tokens = state["expected_tokens"]
