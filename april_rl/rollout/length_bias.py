"""`length_bias/*`: whether trained groups have the same lengths and rewards as opened groups.

Partial rollouts train short responses first: until the long ones of the first steps are finished,
trained responses are shorter than those the policy writes. After that, as many long ones arrive
from earlier steps as are left to later ones. A schedule that lost or starved long samples would
show here.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from april_rl.metrics import Mean, Metrics
from april_rl.rollout.buffer import Buffer
from april_rl.rollout.codec import Plain
from april_rl.types import ScoredGroup

# More steps than a group may live, so that the longest responses in the window are known.
_WINDOW_STEPS = 20
_FEWEST_BATCHES = 10  # of which a dispersion is given
_NEIGHBOURS = 5  # steps of the running mean that a batch is compared with, itself in the middle


@dataclass(slots=True, kw_only=True)
class _Step:
    """Counts of one step: groups opened, scored and trained."""

    # Response tokens of each sample [G], by prompt id; empty while the group is open.
    opened: dict[int, list[int]] = field(default_factory=dict)
    num_scored: int = 0  # samples
    scored_reward: float = 0.0  # Σ over them
    num_trained: int = 0  # samples
    trained_reward: float = 0.0
    trained_tokens: int = 0
    # Of each trained group, the mean of its samples: response tokens, and rewards.
    group_lengths: list[float] = field(default_factory=list)
    group_rewards: list[float] = field(default_factory=list)
    # All lengths in `opened`: millions with hundreds of engines, and every step reads them.
    lengths: array[int] = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = array("i", chain.from_iterable(self.opened.values()))

    def close(self, prompt_id: int, lengths: list[int]) -> None:
        """Record the lengths of a complete group that this step opened."""
        self.opened[prompt_id] = lengths
        self.lengths.extend(lengths)

    def save(self) -> Plain:
        """Return the fields that cannot be derived from others."""
        plain = {name: value for name, value in asdict(self).items() if name != "lengths"}
        return {**plain, "opened": [[id_, lengths] for id_, lengths in self.opened.items()]}


class LengthBias:
    """Counts of the last steps."""

    def __init__(self, *, window_steps: int = _WINDOW_STEPS) -> None:
        """`window_steps` is how many steps the metrics cover, the current one included."""
        self._steps: deque[_Step] = deque([_Step()], maxlen=window_steps)
        self._opened_in: dict[int, _Step] = {}  # the step that opened each open group

    def begin_step(self) -> None:
        """Count what follows for a new step."""
        self._steps.append(_Step())

    def open(self, prompt_id: int) -> None:
        """Count an opened group."""
        step = self._opened_in[prompt_id] = self._steps[-1]
        step.opened[prompt_id] = []

    def close(self, prompt_id: int, lengths: list[int], *, rewards: Sequence[float]) -> None:
        """Count a complete group with response lengths [G] and its rewards; without rewards it is
        dropped.
        """
        # A group opened before the window is recorded in a step that is not counted any more.
        step = self._opened_in.pop(prompt_id)
        step.close(prompt_id, lengths)
        self._steps[-1].num_scored += len(rewards)
        self._steps[-1].scored_reward += sum(rewards)

    def train(self, groups: Iterable[ScoredGroup], *, num_tokens: int) -> None:
        """Count the groups that the step trains, with their response tokens in total."""
        step = self._steps[-1]
        step.trained_tokens += num_tokens
        for scored in groups:
            step.num_trained += len(scored.rewards)
            step.trained_reward += sum(scored.rewards)
            step.group_lengths.append(fmean(s.num_tokens for s in scored.group.samples))
            step.group_rewards.append(fmean(scored.rewards))

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
        window = {id(step) for step in self._steps}
        before = [id_ for id_, step in self._opened_in.items() if id(step) not in window]
        lengths, is_finished = buffer.lengths(without=before)
        finished = np.concatenate([lengths[is_finished], *(step.lengths for step in self._steps)])
        opened = restricted_mean(finished, lengths[~is_finished])
        num_scored = sum(step.num_scored for step in self._steps)
        num_trained = sum(step.num_trained for step in self._steps)
        return _without_empty(
            {
                "opened_tokens_mean": Mean(opened, float(finished.size > 0)),
                "trained_tokens_mean": Mean(
                    sum(step.trained_tokens for step in self._steps), num_trained
                ),
                "scored_reward_mean": Mean(
                    sum(step.scored_reward for step in self._steps), num_scored
                ),
                "trained_reward_mean": Mean(
                    sum(step.trained_reward for step in self._steps), num_trained
                ),
                "dispersion": _mean(dispersion([step.group_lengths for step in self._steps])),
                "reward_dispersion": _mean(
                    dispersion([step.group_rewards for step in self._steps])
                ),
            }
        )

    def save(self) -> list[Plain]:
        """Return the steps of the window, oldest first."""
        return [step.save() for step in self._steps]

    def restore(self, state: list[Plain], *, open_ids: Iterable[int]) -> None:
        """Restore `state`, with these open groups."""
        self._steps.clear()
        self._steps.extend(_Step(**{**step, "opened": dict(step["opened"])}) for step in state)
        opened_in = {prompt_id: step for step in self._steps for prompt_id in step.opened}
        self._opened_in = {id_: opened_in.get(id_, _Step()) for id_ in open_ids}


def restricted_mean(finished: ArrayLike, unfinished: ArrayLike) -> float:
    """Return the mean length, given samples `finished` [F] and lower bounds `unfinished` [U].

    It is the area under the product-limit estimate of survival (Kaplan & Meier 1958) up to the
    longest length seen, so lengths above that are left out; 0 without samples. Leaving out the
    unfinished ones, or taking them as finished, would give a mean that is too small.
    """
    ends, num_ended = _counted(np.asarray(finished))
    cuts = np.sort(np.asarray(unfinished, float))
    longest = max([*ends[-1:], *cuts[-1:]], default=0.0)
    # Samples of at least this length, including unfinished ones of the same length.
    at_risk = num_ended[::-1].cumsum()[::-1] + len(cuts) - np.searchsorted(cuts, ends)
    survival = np.cumprod(1 - num_ended / at_risk)
    edges = np.concatenate([[0.0], ends, [longest]])
    return float((np.concatenate([[1.0], survival]) * np.diff(edges)).sum())


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


def _mean(value: float | None) -> Mean:
    return Mean(0.0, 0.0) if value is None else Mean(value, 1.0)


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
