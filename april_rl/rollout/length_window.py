"""The response lengths of the groups opened last, the unfinished ones at what they may come to."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from april_rl.types import Completion


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
        self._groups: dict[int, _Group] = {}  # by prompt id

    def __len__(self) -> int:
        """Groups held."""
        return len(self._groups)

    def observe(self, completions: Iterable[Completion]) -> None:
        """Take in how far samples have come by these."""
        for completion in completions:
            prompt_id, index = completion.sample_id
            group = self._groups.get(prompt_id)
            if group is None:
                group = self._groups[prompt_id] = _Group(self._group_size)
            group.lengths[index] = completion.start + len(completion.token_ids)
            group.is_finished[index] = completion.finish_reason is not None
        surplus = sorted(self._groups)[: max(0, len(self._groups) - self._num_groups)]
        for prompt_id in surplus:
            del self._groups[prompt_id]

    def draw(self, num_groups: int, *, rng: np.random.Generator) -> NDArray[np.float64]:
        """Response tokens [num_groups, G] of groups of the window, each as often as any other.

        The rest of an unfinished sample is drawn from those that were once as long.
        """
        held = [self._groups[prompt_id] for prompt_id in sorted(self._groups)]
        lengths = np.array([group.lengths for group in held])
        is_finished = np.array([group.is_finished for group in held])
        whole = finished_lengths(lengths.ravel(), is_finished.ravel(), rng=rng)
        whole = np.minimum(np.maximum(whole, 1.0), self._max_response_tokens)
        rounds = -(-num_groups // len(held))
        order = np.concatenate([rng.permutation(len(held)) for _ in range(rounds)])
        drawn: NDArray[np.float64] = whole.reshape(lengths.shape)[order[:num_groups]]
        return drawn


class _Group:
    """Response tokens so far, and whether they are all [G]; samples not yet started have none."""

    def __init__(self, group_size: int) -> None:
        self.lengths = np.zeros(group_size)
        self.is_finished = np.zeros(group_size, dtype=np.bool_)


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
