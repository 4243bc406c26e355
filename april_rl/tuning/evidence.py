"""What a run has shown of its response lengths and of its engines' cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from april_rl.rollout.stats import Progress, StepStats
from april_rl.ticks import Completions, Tick
from april_rl.tuning.censored_lengths import LengthWindow
from april_rl.tuning.engine_cost import MIN_TICKS, EngineCost, fit_cost
from april_rl.tuning.forecast import Rules, Work, num_groups_played

_WINDOW_STEPS = 12  # groups opened in so many steps
_MIN_WINDOW_GROUPS = 64
_COST_STEPS = 12  # of each number of slots
_TICKS_PER_STEP = 16  # what is kept of a step: sums of ticks that follow each other
# Requests per engine step that differ by so much tell a step's own cost from that of a request.
_LOAD_SPREAD = 1.3
_ANY_COST = EngineCost(step_s=1.0, sample_s=0.0, context_token_s=0.0, prefill_token_s=0.0)


class Evidence:
    """Sliding windows over the steps of a run."""

    def __init__(self, rules: Rules, *, max_response_tokens: int) -> None:
        """Nothing known."""
        self._rules = rules
        self._lengths = LengthWindow(
            num_groups=max(_MIN_WINDOW_GROUPS, _WINDOW_STEPS * rules.num_groups),
            group_size=rules.group_size,
            max_response_tokens=max_response_tokens,
        )
        self._ticks: dict[int, deque[list[Tick]]] = {}  # by number of slots, of the last steps
        self._groups: deque[tuple[int, int]] = deque(maxlen=_WINDOW_STEPS)  # trained, rejected
        self._resumed: deque[tuple[int, int]] = deque(maxlen=_WINDOW_STEPS)  # and kept ones
        self._prompt_tokens = 0.0

    def observe(self, stats: StepStats, *, num_groups: int) -> None:
        """Take in a step that trains `num_groups`."""
        self._groups.append((num_groups, stats.rejected_groups))
        if stats.resumed_samples:
            self._resumed.append((stats.resumed_samples, stats.kept_samples))
        if stats.progress:
            self._observe_lengths(stats.progress)
            self._prompt_tokens = stats.prompt_tokens / len(stats.progress)
        ticks = [tick for tick in stats.ticks if tick.engine_steps]
        if ticks:
            of_load = self._ticks.setdefault(stats.num_slots, deque(maxlen=_COST_STEPS))
            of_load.append([_sum(part) for part in _parts(ticks, _TICKS_PER_STEP)])

    def _observe_lengths(self, progress: Sequence[Progress]) -> None:
        prompt_ids, indices = np.array([each.sample_id for each in progress], np.int64).T
        self._lengths.observe(
            prompt_ids,
            indices,
            lengths=np.array([each.num_tokens for each in progress], np.int64),
            is_finished=np.array([each.is_finished for each in progress], np.bool_),
        )

    @property
    def suffices(self) -> bool:
        """Whether there is something to go by."""
        return len(self._lengths) > 0 and len(self._all_ticks()) >= MIN_TICKS

    @property
    def tells_loads_apart(self) -> bool:
        """Whether batches of different sizes were seen."""
        loads = [tick.slot_steps / tick.engine_steps for tick in self._all_ticks()]
        low, high = np.percentile(loads, (10, 90))
        return bool(high >= _LOAD_SPREAD * low)

    def work(self, *, seed: int) -> Work:
        """What the next steps will ask for, drawn with `seed`; any cost while batches of one size
        were seen only.
        """
        trained, rejected = np.sum(self._groups, axis=0)
        kept_frac = max(float(trained / max(1, trained + rejected)), 0.05)
        num_groups = num_groups_played(self._rules, kept_frac=kept_frac)
        resumed, kept = np.sum(self._resumed, axis=0) if self._resumed else (1, 0)
        return Work(
            lengths=self._lengths.draw(num_groups, rng=np.random.default_rng(seed)),
            is_kept=_spread(num_groups, kept_frac),
            prompt_tokens=self._prompt_tokens,
            reprefill_frac=1 - float(kept / resumed),
            cost=fit_cost(self._all_ticks()) if self.tells_loads_apart else _ANY_COST,
        )

    def _all_ticks(self) -> list[Tick]:
        return [tick for steps in self._ticks.values() for step in steps for tick in step]


def _parts(ticks: Sequence[Tick], count: int) -> list[Sequence[Tick]]:
    """The ticks in at most `count` parts of about one length, in order."""
    size = -(-len(ticks) // count)
    return [ticks[first : first + size] for first in range(0, len(ticks), size)]


def _sum(ticks: Sequence[Tick]) -> Tick:
    """One tick that did what all of them did."""
    return Tick(
        finished=Completions(),
        num_running=ticks[-1].num_running,
        num_queued=ticks[-1].num_queued,
        engine_steps=sum(tick.engine_steps for tick in ticks),
        slot_steps=sum(tick.slot_steps for tick in ticks),
        context_token_steps=sum(tick.context_token_steps for tick in ticks),
        generated_tokens=sum(tick.generated_tokens for tick in ticks),
        prefilled_tokens=sum(tick.prefilled_tokens for tick in ticks),
        elapsed_s=sum(tick.elapsed_s for tick in ticks),
    )


def _spread(count: int, share: float) -> NDArray[np.bool_]:
    """[count], true for `share` of them, spread evenly."""
    upto = np.floor(np.arange(count + 1) * share + 1e-9)
    return np.diff(upto) > 0
