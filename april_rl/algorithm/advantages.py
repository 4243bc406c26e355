"""Rewards of groups to advantages, one for each sample; what a group is, is always said by the
caller.

Legend: [G] samples of a group, [K] groups of equal size. `valid` says which samples count: one that
failed has no reward (its number may be anything, also NaN), gets advantage 0, and enters no mean
and no standard deviation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

STD_EPS = 1e-6  # keeps a group of almost equal rewards finite

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

# Rewards and validity of one group [G] to advantages [G].
GroupAdvantages = Callable[[ArrayLike, ArrayLike], Floats]
# The same of every group a step trains: what estimators that look at the whole batch need.
BatchAdvantages = Callable[[Sequence[ArrayLike], Sequence[ArrayLike]], list[Floats]]


def grpo(rewards: ArrayLike, valid: ArrayLike = True) -> Floats:
    """(reward - mean) / (std + 1e-6) [G]; Shao et al. 2024 (DeepSeekMath), section 4.1.2.

    The standard deviation is the sample one (divisor G - 1), as in TRL, verl and slime: learning
    rates found with them carry over; with G = 8 the population one would make every advantage 7 %
    larger. Zeros for equal rewards, and for a group of one.
    """
    values, is_valid = _checked(rewards, valid)
    return _scaled(_centred(values, is_valid), is_valid)


def dr_grpo(rewards: ArrayLike, valid: ArrayLike = True) -> Floats:
    """reward - mean [G]; Liu et al. 2025 (Dr. GRPO), section 3.2.

    Undivided, hard and easy prompts keep the weight their spread gives them. Exactly zeros for
    equal rewards, which rounding of the mean would not give.
    """
    return _centred(*_checked(rewards, valid))


def rloo(rewards: ArrayLike, valid: ArrayLike = True) -> Floats:
    """reward - mean of the others [G]; Kool et al. 2019; Ahmadian et al. 2024 (RLOO), section 3.2.

    A baseline without the sample itself leaves the policy gradient unbiased. With n valid samples
    it is n / (n - 1) times `dr_grpo`; zeros when only one is valid.
    """
    values, is_valid = _checked(rewards, valid)
    num_valid = is_valid.sum(axis=-1, keepdims=True)
    scale: Floats = num_valid / np.maximum(num_valid - 1, 1)
    return _centred(values, is_valid) * scale


def by_group(advantages: GroupAdvantages) -> BatchAdvantages:
    """The estimator that treats every group of a batch by itself with `advantages`, which is one of
    the three above.
    """

    def of_batch(groups: Sequence[ArrayLike], valid: Sequence[ArrayLike]) -> list[Floats]:
        # Thousands of groups, as a rule of one size and without a failed sample: all at once.
        is_whole = len(valid) == len(groups) and all(mask is True for mask in valid)
        if is_whole and len({np.shape(group) for group in groups}) == 1:
            return list(advantages(np.asarray(groups), True))  # [K, G]
        return [advantages(group, mask) for group, mask in zip(groups, valid, strict=True)]

    return of_batch


def reinforce_pp(groups: Sequence[ArrayLike], valid: Sequence[ArrayLike]) -> list[Floats]:
    """(reward - batch mean) / (batch std + 1e-6), by group [G]; Hu et al. 2025 (REINFORCE++), the
    variant without a group baseline.

    Mean and sample standard deviation are those of all valid samples of the batch, each counted
    once; its KL term is not part of the reward here. It works with one sample a prompt and gives
    signal to groups of equal rewards. Zeros when all rewards of the batch are equal.
    """
    sizes, values, is_valid = _joined(groups, valid)
    centred = _centred(values, is_valid)
    return _split(_scaled(centred, is_valid), sizes)


def reinforce_pp_baseline(groups: Sequence[ArrayLike], valid: Sequence[ArrayLike]) -> list[Floats]:
    """(reward - group mean) / (batch std of that + 1e-6), by group [G]; Hu et al. 2025
    (REINFORCE++), the variant with baseline.

    The spread is the whole batch's, so that a group of almost equal rewards is not blown up as in
    `grpo`; the batch mean of what remains is 0 by itself. Exactly zeros for a group of equal
    rewards.
    """
    sizes, _, is_valid = _joined(groups, valid)
    centred = np.concatenate(by_group(dr_grpo)(groups, valid))
    return _split(_scaled(centred, is_valid), sizes)


def _checked(rewards: ArrayLike, valid: ArrayLike) -> tuple[Floats, Mask]:
    """Rewards and validity as arrays, [G] both, or [K, G] when all are valid; one validity stands
    for all.
    """
    values = np.asarray(rewards, dtype=np.float64)
    assert values.size > 0, "a group without samples"
    is_valid = np.broadcast_to(np.asarray(valid, dtype=np.bool_), values.shape)
    assert values.ndim == 1 or (values.ndim == 2 and is_valid.all()), values.shape
    assert np.isfinite(values[is_valid]).all(), "a valid sample's reward must be a number"
    return values, is_valid


def _centred(values: Floats, is_valid: Mask) -> Floats:
    """Values less their group's mean, both over valid ones; exactly zeros when those are equal."""
    if is_valid.all():
        is_equal = (values == values[..., :1]).all(axis=-1, keepdims=True)
        return np.where(is_equal, 0.0, values - values.mean(axis=-1, keepdims=True))
    chosen = values[is_valid]
    centred = np.zeros_like(values)
    if chosen.size and not np.all(chosen == chosen[0]):
        centred[is_valid] = chosen - chosen.mean()
    return centred


def _scaled(centred: Floats, is_valid: Mask) -> Floats:
    """`centred` over the sample standard deviation of its group's valid ones; zeros stay zeros."""
    if not centred.any():
        return centred
    if is_valid.all():
        spread: Floats = np.std(centred, axis=-1, ddof=1, keepdims=True)
        return centred / (spread + STD_EPS)
    return centred / (float(np.std(centred[is_valid], ddof=1)) + STD_EPS)


def _joined(
    groups: Sequence[ArrayLike], valid: Sequence[ArrayLike]
) -> tuple[list[int], Floats, Mask]:
    """Sizes of the groups, and their rewards and validity one behind the other."""
    checked = [_checked(group, mask) for group, mask in zip(groups, valid, strict=True)]
    assert checked, "a batch without groups"
    sizes = [len(values) for values, _ in checked]
    values, is_valid = (np.concatenate(parts) for parts in zip(*checked, strict=True))
    return sizes, values, is_valid


def _split(values: Floats, sizes: Sequence[int]) -> list[Floats]:
    return np.split(values, np.cumsum(sizes)[:-1])
