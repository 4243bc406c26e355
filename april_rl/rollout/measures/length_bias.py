"""`length_bias/*`: whether trained groups have the same lengths and rewards as opened groups.

Partial rollouts train short responses first: until the long ones of the first steps are finished,
trained responses are shorter than those the policy writes. After that, as many long ones arrive
from earlier steps as are left to later ones. A schedule that lost or starved long samples would
show here.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from april_rl.metrics import Mean, Metrics
from april_rl.rollout.buffer import Buffer
from april_rl.rollout.codec import Plain
from april_rl.rollout.record import GroupEvents

# More steps than a group may live, so that the longest responses in the window are known.
_WINDOW_STEPS = 20
_FEWEST_BATCHES = 10  # of which a dispersion is given
_NEIGHBOURS = 5  # steps of the running mean that a batch is compared with, itself in the middle


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """The groups that one step opened, settled and trained; G is the group size."""

    first_id: int | None  # of the prompts that it opened; None if it opened none
    settled_ids: array[int]  # [n] prompts of groups that became ready, rejected or dropped
    settled_lengths: array[int]  # [n · G] response tokens
    scored_rewards: array[float]  # of the samples of ready and rejected groups
    trained_lengths: array[int]  # [m · G]
    trained_rewards: array[float]  # [m · G]

    @classmethod
    def of(cls, events: GroupEvents) -> Self:
        """Return what length bias needs of a step."""
        settled, trained = events.settled, events.trained
        samples = (sample for scored in trained for sample in scored.group.samples)
        return cls(
            first_id=min(events.opened, default=None),
            settled_ids=array("i", [each.prompt_id for each in settled]),
            settled_lengths=array("i", chain.from_iterable(each.lengths for each in settled)),
            scored_rewards=array("d", chain.from_iterable(each.rewards for each in settled)),
            trained_lengths=array("i", [sample.num_tokens for sample in samples]),
            trained_rewards=array("d", chain.from_iterable(each.rewards for each in trained)),
        )

    def lengths(self, group_size: int, *, since: float) -> NDArray[np.int64]:
        """Return the response tokens of the settled samples with prompts from the id `since` on."""
        by_group = np.array(self.settled_lengths).reshape(-1, group_size)
        return by_group[np.array(self.settled_ids) >= since].ravel()


class LengthBias:
    """The last steps, and how the groups that they trained differ from those that they opened."""

    def __init__(self, group_size: int, *, window_steps: int = _WINDOW_STEPS) -> None:
        """`window_steps` is how many steps the metrics cover."""
        self._group_size = group_size
        self._steps: deque[_Step] = deque(maxlen=window_steps)

    def add(self, events: GroupEvents) -> None:
        self._steps.append(_Step.of(events))

    def metrics(self, buffer: Buffer) -> Metrics:
        """Return `length_bias/*` over the window; `buffer` holds the open groups.

        `opened_tokens_mean`: mean response length of all samples of the groups *opened* in these
        steps, whatever became of them; the length of an unfinished one is a lower bound
        (`restricted_mean`). `trained_tokens_mean`: mean response length of the samples *trained* in
        these steps.

        `scored_reward_mean`: mean reward of the samples of all groups scored in these steps,
        including rejected ones. `trained_reward_mean`: mean reward of the trained ones.

        Without a filter each pair agrees unless something is biased, except in the first steps. A
        filter selects by reward, so with one they differ by that selection.

        `dispersion`: how much the mean response length of a batch varies from step to step, beside
        slow changes, as a multiple of what batches drawn at random would (`dispersion`);
        `reward_dispersion`: the same of the mean reward.
        """
        opened_from = [step.first_id for step in self._steps if step.first_id is not None]
        since = min(opened_from, default=math.inf)
        lengths, is_finished = buffer.lengths(since=since)
        settled = [step.lengths(self._group_size, since=since) for step in self._steps]
        finished = np.concatenate([lengths[is_finished], *settled])
        opened = restricted_mean(finished, lengths[~is_finished])
        trained_lengths = [step.trained_lengths for step in self._steps]
        trained_rewards = [step.trained_rewards for step in self._steps]
        return _without_empty(
            {
                "opened_tokens_mean": Mean(opened, float(finished.size > 0)),
                "trained_tokens_mean": _mean_of(trained_lengths),
                "scored_reward_mean": _mean_of([step.scored_rewards for step in self._steps]),
                "trained_reward_mean": _mean_of(trained_rewards),
                "dispersion": self._dispersion(trained_lengths),
                "reward_dispersion": self._dispersion(trained_rewards),
            }
        )

    def _dispersion(self, steps: Sequence[array[Any]]) -> Mean:
        """Return the dispersion of the steps' batches, of which a group counts with its mean."""
        found = dispersion(
            [np.array(step).reshape(-1, self._group_size).mean(axis=1).tolist() for step in steps]
        )
        return Mean(0.0, 0.0) if found is None else Mean(found, 1.0)

    def save(self) -> list[Plain]:
        """Return the steps of the window, oldest first."""
        return [
            {each.name: getattr(step, each.name) for each in fields(step)} for step in self._steps
        ]

    def restore(self, state: list[Plain]) -> None:
        """Restore what was saved."""
        self._steps.clear()
        self._steps.extend(_Step(**step) for step in state)


def survival(
    finished: ArrayLike, unfinished: ArrayLike
) -> tuple[NDArray[Any], NDArray[np.floating[Any]]]:
    """Return the distinct `finished` lengths [D] in rising order, and the share of all samples [D]
    that is longer, given samples `finished` [F] and lower bounds `unfinished` [U].

    It is the product-limit estimate (Kaplan & Meier 1958). Leaving out the unfinished samples, or
    taking them as finished, would give lengths that are too short.
    """
    ends, num_ended = _counted(np.asarray(finished))
    cuts = np.sort(np.asarray(unfinished, float))
    # Samples of at least this length, including unfinished ones of the same length.
    at_risk = num_ended[::-1].cumsum()[::-1] + len(cuts) - np.searchsorted(cuts, ends)
    return ends, np.cumprod(1 - num_ended / at_risk)


def restricted_mean(finished: ArrayLike, unfinished: ArrayLike) -> float:
    """Return the mean length, given samples `finished` [F] and lower bounds `unfinished` [U].

    It is the area under the `survival` curve up to the longest length seen, so lengths above that
    are left out; 0 without samples.
    """
    ends, longer = survival(finished, unfinished)
    longest = max(np.max(ends, initial=0.0), np.max(unfinished, initial=0.0))
    edges = np.concatenate([[0.0], ends, [longest]])
    return float((np.concatenate([[1.0], longer]) * np.diff(edges)).sum())


def dispersion(batches: Sequence[Sequence[float]]) -> float | None:
    """Return the standard deviation of the batches' means around their running mean, divided by
    what it is expected to be if every batch were drawn at random: the standard deviation of the
    values over the root of a batch's size. 1 is a random draw. None with too few batches to tell,
    or when all values are equal.

    The running mean over neighbouring steps takes out what changes slowly: a policy whose responses
    grow longer is no schedule that sorts them.
    """
    filled = [np.asarray(batch, float) for batch in batches if batch]
    if len(filled) < _FEWEST_BATCHES or np.ptp(np.concatenate(filled)) == 0:
        return None
    means = np.array([batch.mean() for batch in filled])
    level = np.convolve(means, np.full(_NEIGHBOURS, 1 / _NEIGHBOURS), "valid")
    edge = _NEIGHBOURS // 2
    inner = filled[edge:-edge]
    values = np.concatenate([batch - mean for batch, mean in zip(inner, level, strict=True)])
    expected = values.var() * len(inner) / len(values)
    # A mean of independent values deviates less from a running mean that it is part of.
    found = np.square(means[edge:-edge] - level).mean() / (1 - 1 / _NEIGHBOURS)
    return float(np.sqrt(found / expected)) if expected else None


def _mean_of(steps: Sequence[array[Any]]) -> Mean:
    return Mean(sum(map(sum, steps)), sum(map(len, steps)))


def _counted(lengths: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the distinct lengths in rising order, and how often each occurs."""
    if not np.issubdtype(lengths.dtype, np.integer):
        return np.unique(lengths, return_counts=True)
    counts = np.bincount(lengths)  # faster than sorting millions
    distinct = np.flatnonzero(counts)
    return distinct, counts[distinct]


def _without_empty(values: dict[str, Mean]) -> Metrics:
    """Leave out means of nothing."""
    return Metrics({f"length_bias/{key}": mean for key, mean in values.items() if mean.weight})
