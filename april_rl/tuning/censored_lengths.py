"""The response lengths of the groups opened last, the unfinished ones at what they may come to."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class LengthWindow:
    """Groups in the order of their opening.

    What is finished first is short, so a window over finished or trained samples is too short until
    the first long ones arrive. A window over opened groups is not: it has every group, and an
    unfinished sample stands for those that got as far as it has.
    """

    def __init__(self, *, num_groups: int, group_size: int, max_response_tokens: int) -> None:
        """`num_groups`: how many groups it holds."""
        self._num_groups, self._group_size = num_groups, group_size
        self._max_response_tokens = max_response_tokens
        self._prompt_ids: NDArray[np.int64] = np.empty(0, np.int64)  # rising
        # [groups, G]: response tokens so far, and whether they are all; none of what did not start.
        self._lengths = np.zeros((0, group_size))
        self._is_finished = np.zeros((0, group_size), np.bool_)

    def __len__(self) -> int:
        """Groups held."""
        return len(self._prompt_ids)

    def observe(
        self,
        prompt_ids: NDArray[np.int64],
        indices: NDArray[np.int64],
        *,
        lengths: NDArray[np.int64],
        is_finished: NDArray[np.bool_],
    ) -> None:
        """Take in how far samples have come [n]; each is in it once at most."""
        held = np.union1d(self._prompt_ids, prompt_ids)[-self._num_groups :]
        self._lengths = self._moved(self._lengths, to=held)
        self._is_finished = self._moved(self._is_finished, to=held)
        self._prompt_ids = held
        is_held = prompt_ids >= held[0]
        groups, places = np.searchsorted(held, prompt_ids[is_held]), indices[is_held]
        self._lengths[groups, places] = lengths[is_held]
        self._is_finished[groups, places] = is_finished[is_held]

    def _moved(self, of_groups: NDArray[Any], *, to: NDArray[np.int64]) -> NDArray[Any]:
        """The rows of the groups held now where the prompts `to` have theirs."""
        moved = np.zeros((len(to), self._group_size), of_groups.dtype)
        _, old, new = np.intersect1d(self._prompt_ids, to, assume_unique=True, return_indices=True)
        moved[new] = of_groups[old]
        return moved

    def draw(self, num_groups: int, *, rng: np.random.Generator) -> NDArray[np.float64]:
        """Response tokens [num_groups, G] of groups of the window, each as often as any other.

        The rest of an unfinished sample is drawn from those that were once as long.
        """
        held = len(self)
        whole = finished_lengths(self._lengths.ravel(), self._is_finished.ravel(), rng=rng)
        whole = np.minimum(np.maximum(whole, 1.0), self._max_response_tokens)
        rounds = -(-num_groups // held)
        order = np.concatenate([rng.permutation(held) for _ in range(rounds)])
        drawn: NDArray[np.float64] = whole.reshape(self._lengths.shape)[order[:num_groups]]
        return drawn


def finished_lengths(
    lengths: NDArray[np.float64], is_finished: NDArray[np.bool_], *, rng: np.random.Generator
) -> NDArray[np.float64]:
    """The lengths [n], those of unfinished samples replaced by whole tokens drawn from what the law
    has beyond them.

    The law is the product-limit estimate of survival (Kaplan and Meier 1958); beyond the longest
    length seen it goes on as an exponential with the maximum-likelihood mean, tokens seen ÷ samples
    finished (Brown, Hollander and Korwar 1974).
    """
    order = np.lexsort((~is_finished, lengths))  # of one length, the finished ones first
    times = lengths[order]
    at_risk = np.arange(len(times), 0, -1)
    survival = np.cumprod(np.where(is_finished[order], 1 - 1 / at_risk, 1.0))
    mean = lengths.sum() / max(1, is_finished.sum())

    so_far = lengths[~is_finished]
    survived = np.concatenate([[1.0], survival])[np.searchsorted(times, so_far, side="right")]
    wanted = survived * rng.uniform(1e-9, 1.0, len(so_far))
    found = np.searchsorted(-survival, -wanted)
    within = times[np.minimum(found, len(times) - 1)]
    is_beyond = found == len(times)
    beyond = np.ceil(times[-1] + mean * np.log(np.maximum(survival[-1], 1e-12) / wanted))
    whole = lengths.copy()
    whole[~is_finished] = np.maximum(so_far + 1, np.where(is_beyond, beyond, within))
    return whole
