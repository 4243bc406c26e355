"""Groups whose samples a dispatch sends to engines."""

from __future__ import annotations

import numpy as np
from fake_engine import FakeEngines, FakeScorer
from rollout_runs import lognormal

from april_rl.rollout.dispatch import Dispatch
from april_rl.rollout.groups import Groups
from april_rl.rollout.stats import StepStats
from april_rl.ticks import Completions
from april_rl.types import Completion


class Sent:
    """Groups of samples that engines have, for a dispatch that sends them."""

    def __init__(self, *, group_size: int, num_engines: int = 2, num_slots: int = 8) -> None:
        self.groups = Groups(FakeScorer(), group_size=group_size, keep=lambda _: True)
        self.table = self.groups.buffer.table
        engines = FakeEngines(lognormal(9, 0.9), num_engines=num_engines, budget=40)
        self.dispatch = Dispatch(engines, self.table, tick_steps=4, max_response_tokens=40, seed=0)
        self.dispatch.begin(num_slots=num_slots)
        self.stats = StepStats(num_slots=num_slots, policy_version=3, clock=lambda: 0.0)

    def extend(self, *completions: Completion, engine: int | None = None) -> list[Completion]:
        """What was awaited of these, from that engine or any."""
        engines = None if engine is None else np.full(len(completions), engine)
        came = Completions(completions)
        return list(self.groups.extend(came, self.stats, engines=engines).completions)

    def in_flight(self) -> list[int]:
        """Samples of each engine."""
        slots = self.dispatch._slots
        return [slots.in_flight(engine) for engine in range(self.dispatch.num_engines)]

    def pending(self) -> dict[int, list[int]]:
        """The rows that go with the next tick of each engine."""
        return {engine: rows for engine, rows in enumerate(self.dispatch._pending) if rows}
