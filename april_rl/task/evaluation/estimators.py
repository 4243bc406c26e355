"""avg@k, pass@k and maj@k: one value for each prompt, from its k samples.

A new test set would draw new prompts, so each estimator returns one value for each prompt, and
intervals are taken over prompts (`april_rl.task.evaluation.intervals`).

Legend: [P] prompts, [n] samples of a prompt. A sample is right when its reward is above 0.5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb

import numpy as np
from numpy.typing import ArrayLike, NDArray

_RIGHT_ABOVE = 0.5
_FULL = 1.0  # the reward calls such an answer equal to the data set's


def averages(rewards: ArrayLike) -> NDArray[np.float64]:
    """Return the mean reward of each prompt [P]; `rewards` [P, n]. Their mean is avg@n."""
    means: NDArray[np.float64] = np.asarray(rewards, dtype=np.float64).mean(axis=1)
    return means


def passes(rewards: ArrayLike, *, k: int) -> NDArray[np.float64]:
    """Return the chance that at least one of k samples is right, for each prompt [P].

    The estimate is unbiased for n >= k samples of which c are right: 1 - C(n - c, k) / C(n, k)
    (Chen et al. 2021, arXiv 2107.03374, eq. 1). `rewards` [P, n]. Raises ValueError when n < k.
    """
    right = np.asarray(rewards, dtype=np.float64) > _RIGHT_ABOVE
    n = right.shape[1]
    if n < k:
        raise ValueError(f"pass@{k} needs at least {k} samples of each prompt, got {n}")
    return np.array([1.0 - comb(n - int(c), k) / comb(n, k) for c in right.sum(axis=1)])


def majorities(rewards: ArrayLike, answers: Sequence[Sequence[str | None]]) -> NDArray[np.float64]:
    """Return whether the most frequent answer of each prompt is right [P]: 0, 1, or a share.

    `rewards` [P, n], `answers` [P][n]; a sample without an answer (None) has no vote, and a prompt
    without votes counts 0. Answers with a reward of 1 are one answer, in all their forms. Answers
    that tie share the prompt equally. If samples with equal answers have different rewards, the
    answer counts as their mean. All n samples vote once (Wang et al. 2022, arXiv 2203.11171): maj@n
    uses n votes and estimates nothing for fewer.
    """
    found = np.asarray(rewards, dtype=np.float64)
    return np.array([_majority(*of_prompt) for of_prompt in zip(found, answers, strict=True)])


def _majority(rewards: NDArray[np.float64], stated: Sequence[str | None]) -> float:
    """Return, for one prompt, the mean correctness of the answers with the most votes."""
    pairs = zip(stated, rewards, strict=True)
    forms = {answer for answer, reward in pairs if answer is not None and reward >= _FULL}
    answers = [min(forms) if answer in forms else answer for answer in stated]  # one for all forms
    right = (rewards > _RIGHT_ABOVE).astype(np.float64)
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    return float(np.mean([right[[a == winner for a in answers]].mean() for winner in winners]))
