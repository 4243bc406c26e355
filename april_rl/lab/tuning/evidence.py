"""Response lengths and engine cost observed in a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

import numpy as np

from april_rl.lab.simulator.engine_cost import MIN_TICKS, EngineCost, fit_cost
from april_rl.lab.simulator.length_distributions import Recorded, finished_lengths
from april_rl.lab.simulator.prediction import Mode
from april_rl.lab.simulator.simulation import Scenario
from april_rl.lab.tuning.comparison import Comparison
from april_rl.training.rollout.codec import Plain
from april_rl.training.rollout.record import GroupState, StepRecord
from april_rl.training.rollout.ticks import TickWork
from april_rl.types import SampleId

_WINDOW_STEPS = 12  # older steps say little, because the policy has changed
_TICKS_PER_STEP = 32  # ticks that are kept per step, evenly spread
# A sample counts as free until its cost is known, so that a larger batch is tried.
_ANY_COST = EngineCost(step_s=1.0, sample_s=0.0, context_token_s=0.0, prefill_token_s=0.0)


class _Length(NamedTuple):
    """The length of a response, as far as it is known."""

    tokens: int
    is_finished: bool  # False: the response has at least this length


def _ended_episodes(record: StepRecord) -> set[SampleId]:
    """Return the samples whose environment ended them in the step; of samples that ended between
    two steps, return those whose group is scored by now.
    """
    settled = [group for group in record.groups.settled if group.state is not GroupState.dropped]
    ended = {each.sample_id for each in record.acted if each.is_finished}
    return ended | {SampleId(g.prompt_id, i) for g in settled for i in range(len(g.lengths))}


class Evidence:
    """Sliding windows over the steps of a run.

    Lengths are kept for the last opened groups, finished or not. Short responses finish first,
    so a window over finished samples alone would be biased towards short ones.
    """

    def __init__(self, settings: Scenario, *, refill: bool) -> None:
        """Begin with the settings of the run, and without lengths and cost."""
        self._settings, self._refill = settings, refill
        self._samples: dict[SampleId, _Length] = {}
        # By number of slots, so that a run that stays with one α keeps the cost of other batch
        # sizes.
        self._ticks: dict[int, list[TickWork]] = {}
        self._trained, self._rejected = 0.0, 0.0  # groups, older ones with less weight
        self._prompt_tokens = 1.0  # mean over the last step

    def observe(self, record: StepRecord) -> None:
        """Learn from a step."""
        decay = 1 - 1 / _WINDOW_STEPS
        self._trained = decay * self._trained + len(record.groups.trained)
        self._rejected = decay * self._rejected + record.groups.lost.rejected
        if record.returned:
            self._prompt_tokens = fmean(each.prompt_tokens for each in record.returned)
            for each in record.returned:
                length = _Length(each.response_tokens, each.is_finished)
                self._samples[each.sample_id] = length
            prompt_ids = sorted({sample_id.prompt_id for sample_id in self._samples})
            first = prompt_ids[-_WINDOW_STEPS * self._settings.num_groups :][0]
            self._samples = {k: v for k, v in self._samples.items() if k.prompt_id >= first}
        for sample_id in _ended_episodes(record) & self._samples.keys():
            self._samples[sample_id] = self._samples[sample_id]._replace(is_finished=True)
        ticks = [tick for _, tick in record.ticks if tick.engine_steps]
        if ticks:
            latest = map(TickWork.of, ticks[:: -(-len(ticks) // _TICKS_PER_STEP)])
            known = [*self._ticks.get(record.num_slots, []), *latest]
            self._ticks[record.num_slots] = known[-_WINDOW_STEPS * _TICKS_PER_STEP :]

    @property
    def suffices(self) -> bool:
        """Return whether enough ticks were observed to fit a cost."""
        return len(self._all_ticks()) >= MIN_TICKS

    @property
    def is_cost_known(self) -> bool:
        """Return whether batches of different sizes were observed.

        One size cannot separate the cost of a step from that of a sample. Without refill, batches
        shrink within every step.
        """
        return len(self._ticks) > 1 or not self._refill

    def comparison(self, factors: Iterable[float], *, seed: int) -> Comparison:
        """Return a comparison of `factors` for the current run; `seed` draws the unknown
        lengths.
        """
        cost = fit_cost(self._all_ticks()) if self.is_cost_known else _ANY_COST
        lengths = finished_lengths(
            [each.tokens for each in self._samples.values()],
            [each.is_finished for each in self._samples.values()],
            rng=np.random.default_rng(seed),
        )
        groups: dict[int, list[int]] = {}
        for (prompt_id, _), tokens in zip(self._samples, lengths, strict=True):
            groups.setdefault(prompt_id, []).append(min(tokens, self._settings.max_response_tokens))
        scenario = replace(
            self._settings,
            length_of=Recorded(groups=tuple(map(tuple, groups.values())), seed=seed),
            cost=cost if cost.step_s + cost.sample_s + cost.context_token_s else _ANY_COST,
            prompt_tokens=max(1, round(self._prompt_tokens)),
            no_signal_frac=min(self._rejected / max(1.0, self._trained + self._rejected), 0.95),
            seed=seed,
        )
        return Comparison(scenario, tuple(Mode(f, refill=self._refill) for f in factors))

    def _all_ticks(self) -> list[TickWork]:
        return [tick for ticks in self._ticks.values() for tick in ticks]

    def save(self) -> Plain:
        """Return the windows as plain data."""
        return {
            "samples": [[*who, *length] for who, length in self._samples.items()],
            "ticks": [[slots, list(map(list, ticks))] for slots, ticks in self._ticks.items()],
            "groups": [self._trained, self._rejected],
            "prompt_tokens": self._prompt_tokens,
        }

    def restore(self, state: Plain) -> None:
        """Continue from what `save` returned."""
        for prompt_id, index, tokens, is_finished in state["samples"]:
            self._samples[SampleId(prompt_id, index)] = _Length(tokens, is_finished)
        self._ticks = {
            slots: [TickWork(*tick) for tick in ticks] for slots, ticks in state["ticks"]
        }
        self._trained, self._rejected = state["groups"]
        self._prompt_tokens = state["prompt_tokens"]
