"""Whether what is trained has the lengths and the rewards of what was opened: `length_bias/*`.

Partial rollouts train short responses first: until the long ones of the first steps are finished,
what is trained is shorter than what the policy writes. Then as many long ones come in from earlier
steps as go out to later ones. A schedule that lost or starved long samples would show here.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from april_rl.metrics import Mean, Metrics
from april_rl.rollout.buffer import Buffer
from april_rl.rollout.codec import Plain
from april_rl.types import ScoredGroup

# More steps than a group may live, so that the longest responses of the window are known.
_WINDOW_STEPS = 20


@dataclass(slots=True, kw_only=True)
class _Step:
    """What a step opened, scored and trained."""

    # By prompt id, the response tokens of each sample [G]; none while the group is open.
    opened: dict[int, list[int]] = field(default_factory=dict)
    num_scored: int = 0  # samples
    scored_reward: float = 0.0  # Σ over them
    num_trained: int = 0  # samples
    trained_reward: float = 0.0
    trained_tokens: int = 0
    # All lengths of `opened`: with hundreds of engines millions that every step reads.
    lengths: array[int] = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = array("i", chain.from_iterable(self.opened.values()))

    def close(self, prompt_id: int, lengths: list[int]) -> None:
        """A group that it opened is complete."""
        self.opened[prompt_id] = lengths
        self.lengths.extend(lengths)

    def save(self) -> Plain:
        """What is not said twice."""
        plain = {name: value for name, value in asdict(self).items() if name != "lengths"}
        return {**plain, "opened": [[id_, lengths] for id_, lengths in self.opened.items()]}


class LengthBias:
    """Counts of the last steps."""

    def __init__(self, *, window_steps: int = _WINDOW_STEPS) -> None:
        """`window_steps`: how many steps the metrics look back, this one included."""
        self._steps: deque[_Step] = deque([_Step()], maxlen=window_steps)
        self._opened_in: dict[int, _Step] = {}  # of the groups that are open

    def begin_step(self) -> None:
        """What comes now belongs to a new step."""
        self._steps.append(_Step())

    def open(self, prompt_id: int) -> None:
        """A group was opened."""
        step = self._opened_in[prompt_id] = self._steps[-1]
        step.opened[prompt_id] = []

    def close(self, prompt_id: int, lengths: list[int], *, rewards: Sequence[float]) -> None:
        """A complete group of these response lengths [G] has its rewards; none when it is dropped
        without.
        """
        # Of a group opened before the window, the entry goes to a step that counts no more.
        step = self._opened_in.pop(prompt_id)
        step.close(prompt_id, lengths)
        self._steps[-1].num_scored += len(rewards)
        self._steps[-1].scored_reward += sum(rewards)

    def train(self, groups: Iterable[ScoredGroup], *, num_tokens: int) -> None:
        """These groups, of so many response tokens in all, are what the step trains."""
        step = self._steps[-1]
        step.trained_tokens += num_tokens
        for scored in groups:
            step.num_trained += len(scored.rewards)
            step.trained_reward += sum(scored.rewards)

    def metrics(self, buffer: Buffer) -> Metrics:
        """`length_bias/*` over the last 20 steps; `buffer` holds the groups that are open.

        `opened_tokens_mean`: mean response length of all samples of the groups *opened* in these
        steps, whatever became of them. Unfinished ones count as at least so long as they are
        (`restricted_mean`).
        `trained_tokens_mean`: mean response length of the samples *trained* in these steps.
        `scored_reward_mean`, `trained_reward_mean`: mean reward of the samples of the groups whose
        scores came in these steps, with those the filter rejected, and of the trained ones.

        Without a filter all pairs agree when nothing is biased, but for the first steps; a filter
        chooses by reward, so with it they differ by what it chooses.
        """
        window = {id(step) for step in self._steps}
        before = [id_ for id_, step in self._opened_in.items() if id(step) not in window]
        lengths, is_finished = buffer.lengths(without=before)
        finished = np.concatenate([lengths[is_finished], *(step.lengths for step in self._steps)])
        opened = restricted_mean(finished, lengths[~is_finished])
        num_scored = sum(step.num_scored for step in self._steps)
        num_trained = sum(step.num_trained for step in self._steps)
        return _of_something(
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
            }
        )

    def save(self) -> list[Plain]:
        """The steps of the window, the oldest first."""
        return [step.save() for step in self._steps]

    def restore(self, state: list[Plain], *, open_ids: Iterable[int]) -> None:
        """Go on where `state` was saved, with these groups open."""
        self._steps.clear()
        self._steps.extend(_Step(**{**step, "opened": dict(step["opened"])}) for step in state)
        opened_in = {prompt_id: step for step in self._steps for prompt_id in step.opened}
        self._opened_in = {id_: opened_in.get(id_, _Step()) for id_ in open_ids}


def restricted_mean(finished: ArrayLike, unfinished: ArrayLike) -> float:
    """Mean of a length law, of which `finished` [F] are samples and `unfinished` [U] lower bounds.

    The area under the product-limit estimate of survival (Kaplan & Meier 1958) up to the longest
    length seen, so what is above that is left out; 0 of nothing. Leaving the unfinished ones out,
    or taking them for finished, gives a mean that is too small.
    """
    ends, num_ended = _counted(np.asarray(finished))
    cuts = np.sort(np.asarray(unfinished, float))
    longest = max([*ends[-1:], *cuts[-1:]], default=0.0)
    # What is as long or longer: an unfinished one of the same length counts among them.
    at_risk = num_ended[::-1].cumsum()[::-1] + len(cuts) - np.searchsorted(cuts, ends)
    survival = np.cumprod(1 - num_ended / at_risk)
    edges = np.concatenate([[0.0], ends, [longest]])
    return float((np.concatenate([[1.0], survival]) * np.diff(edges)).sum())


def _counted(lengths: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The distinct lengths, rising, and how many there are of each."""
    if not np.issubdtype(lengths.dtype, np.integer):
        return np.unique(lengths, return_counts=True)
    counts = np.bincount(lengths)  # without the search of millions that sorting is
    distinct = np.flatnonzero(counts)
    return distinct, counts[distinct]


def _of_something(values: dict[str, Mean]) -> Metrics:
    """Without the means of nothing."""
    return Metrics({f"length_bias/{key}": mean for key, mean in values.items() if mean.weight})
