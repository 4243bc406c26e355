"""Turn the rewards of groups into advantages, one for each sample or one for each token.

Legend: [G] samples of a group, [R] response tokens of a sample, [K] its turns. Every sample has a
reward: a group with a failed reward was dropped before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from april_rl.config.choices import Advantage
from april_rl.config.task import RewardConfig
from april_rl.types import Observation, Parts, Sample, ScoredGroup, differ

STD_EPS = 1e-6  # keeps a group of almost equal rewards finite

Floats64 = NDArray[np.float64]

# Maps the rewards of one group [G] to advantages [G].
GroupAdvantages = Callable[[ArrayLike], Floats64]
# Maps the rewards and the numbers of response tokens of all groups of a step to advantages, for
# estimators that need the whole batch.
BatchAdvantages = Callable[[Sequence[ArrayLike], Sequence[Sequence[int]]], list[Floats64]]
# Maps all groups of a step and their rewards minus the overlong penalty [G] to what every sample,
# or each of its tokens [R], is paid: its advantage, or with a critic its reward.
Credits = Callable[
    [Sequence[ScoredGroup], Sequence[ArrayLike]], Sequence[Sequence[float | Floats64]]
]


def grpo(rewards: ArrayLike) -> Floats64:
    """(reward - mean) / (std + 1e-6) [G]; Shao et al. 2024 (DeepSeekMath), section 4.1.2.

    The standard deviation is the sample one (divisor G - 1), as in TRL, verl and slime, so learning
    rates found with them carry over; with G = 8 the population one would make every advantage 7 %
    larger. The result is zeros for a group of one and for equal rewards; in this module,
    `april_rl.types.differ` decides whether rewards are equal.
    """
    return _scale(_centre(_check(rewards)))


def dr_grpo(rewards: ArrayLike) -> Floats64:
    """reward - mean [G]; Liu et al. 2025 (Dr. GRPO), section 3.2.

    Without the division, hard and easy prompts keep the weight that their spread gives them. The
    result is exactly zero for equal rewards, without the rounding error of a mean.
    """
    return _centre(_check(rewards))


def rloo(rewards: ArrayLike) -> Floats64:
    """reward - mean of the others [G]; Kool et al. 2019; Ahmadian et al. 2024 (RLOO), section 3.2.

    A baseline without the sample itself leaves the policy gradient unbiased. It is G / (G - 1)
    times `dr_grpo`; zeros for a group of one.
    """
    values = _check(rewards)
    return _centre(values) * (len(values) / max(len(values) - 1, 1))


def by_group(advantages: GroupAdvantages) -> BatchAdvantages:
    """Return the batch estimator that applies `advantages`, one of the three above, to each group
    alone.
    """
    return lambda groups, _num_tokens: [advantages(group) for group in groups]


def reinforce_pp(
    groups: Sequence[ArrayLike], num_tokens: Sequence[Sequence[int]]
) -> list[Floats64]:
    """(reward - mean) / (std + 1e-6), by group [G], over all response tokens of the batch; Hu et
    al. 2025 (REINFORCE++), the variant without a group baseline.

    Every token is an observation of its sample's reward, as in verl, NeMo RL and slime, so a long
    response counts more; the paper's KL term is not part of the reward here. It works with one
    sample a prompt and gives a signal to groups of equal rewards. The result is zeros if all
    rewards of the batch are equal.
    """
    checked = [_check(group) for group in groups]
    return _split(_over_tokens(np.concatenate(checked), num_tokens), like=checked)


def reinforce_pp_baseline(
    groups: Sequence[ArrayLike], num_tokens: Sequence[Sequence[int]]
) -> list[Floats64]:
    """(c - mean) / (std + 1e-6) with c = reward - group mean, by group [G], over all response
    tokens of the batch; Hu et al. 2025 (REINFORCE++), the variant with baseline.

    The standard deviation is taken over the whole batch, so a group of almost equal rewards is not
    blown up as in `grpo`. The mean over tokens is 0 where responses have equal lengths; elsewhere
    a group of equal rewards gets a small advantage too, as in verl, NeMo RL and slime.
    """
    centred = [dr_grpo(group) for group in groups]
    return _split(_over_tokens(np.concatenate(centred), num_tokens), like=centred)


def gdpo(groups: Sequence[Sequence[Parts]], weights: Mapping[str, float]) -> list[Floats64]:
    """(s - mean) / (std + 1e-6), by group [G], over all samples of the batch; s is the sum over the
    reward functions of weight · `grpo` of the function's values; Liu et al. 2026 (GDPO), section
    3.1.

    The spread of a function's values does not matter, only its weight does, and two samples
    of equal reward differ if one is better by one function and one by another. Mean and standard
    deviation of the batch count every sample once, as in the paper and TRL; verl counts it once for
    each of its tokens. `algorithm.dynamic_sampling` still compares rewards, so it drops a group of
    equal ones.
    """
    sums = [_sum_of_scaled(group, weights) for group in groups]
    return _split(_scale(_centre(np.concatenate(sums))), like=sums)


def _sum_of_scaled(group: Sequence[Parts], weights: Mapping[str, float]) -> Floats64:
    """Return the weighted sum [G] over the functions that have scored every sample of a group."""
    values = [dict(parts) for parts in group]
    total = np.zeros(len(values))
    for name, weight in weights.items():
        if all(name in of_sample for of_sample in values):
            total += weight * grpo([of_sample[name] for of_sample in values])
    return total


def grpo_by_turn(
    samples: Sequence[Sample], rewards: ArrayLike, *, environment_weight: float
) -> list[Floats64]:
    """Return the advantages of the tokens of each sample of a group [R], from the rewards of turns.

    Rewards are scaled as in `grpo`, over all turns of the group; the advantage of a token is the
    sum over its turn and all later turns: process supervision of Shao et al. 2024
    (DeepSeekMath), section 4.1.3. A turn earns the environment's reward for it, times the weight of
    that reward function; the last turn also earns the rest of the reward (other reward functions,
    the overlong penalty). For samples of one turn this is `grpo`.
    """
    turns = [
        _turns(sample, reward, environment_weight)
        for sample, reward in zip(samples, _check(rewards), strict=True)
    ]
    scaled = _scale(_centre(np.concatenate([earned for _, earned in turns])))
    by_sample = _split(scaled, like=[np.asarray(earned) for _, earned in turns])
    return [
        np.repeat(of_turns[::-1].cumsum()[::-1], num_tokens)
        for (num_tokens, _), of_turns in zip(turns, by_sample, strict=True)
    ]


def token_rewards(sample: Sample, reward: float, *, environment_weight: float) -> Floats64:
    """Return the rewards of the tokens of a sample [R], from which a critic makes advantages. The
    last token of a turn has the reward of the turn, as in `grpo_by_turn`; all other tokens have 0.
    """
    num_tokens, earned = _turns(sample, reward, environment_weight)
    rewards = np.zeros(sum(num_tokens))
    rewards[np.cumsum(num_tokens) - 1] = earned
    return rewards


def _turns(
    sample: Sample, reward: float, environment_weight: float
) -> tuple[list[int], list[float]]:
    """Return the number of response tokens of each turn of a sample [K], and what it earned: the
    environment's reward times its weight, plus the rest of the reward for the last turn.
    """
    num_tokens: list[int] = []
    earned: list[float] = []
    is_between = True
    for span in sample.spans:
        if isinstance(span, Observation):
            is_between = True
            if earned:
                earned[-1] += environment_weight * span.reward
        elif is_between:
            is_between = False
            num_tokens.append(len(span.token_ids))
            earned.append(0.0)
        else:
            num_tokens[-1] += len(span.token_ids)
    earned[-1] += reward - sum(earned)
    return num_tokens, earned


def _check(rewards: ArrayLike) -> Floats64:
    values = np.asarray(rewards, dtype=np.float64)
    assert values.ndim == 1, values.shape
    assert values.size > 0, "a group without samples"
    assert np.isfinite(values).all(), "a reward must be a number"
    return values


def _centre(values: Floats64) -> Floats64:
    """Return values minus their mean; exactly zeros if they differ by no more than rounding."""
    if not differ(float(values.min()), float(values.max())):
        return np.zeros_like(values)
    centred: Floats64 = values - values.mean()
    return centred


def _scale(centred: Floats64) -> Floats64:
    """Return `centred` divided by its sample standard deviation; zeros stay zeros."""
    if not centred.any():
        return centred
    scaled: Floats64 = centred / (float(np.std(centred, ddof=1)) + STD_EPS)
    return scaled


def _over_tokens(values: Floats64, num_tokens: Sequence[Sequence[int]]) -> Floats64:
    """Return values minus their mean, divided by their sample standard deviation, where each value
    counts as often as its sample has tokens; exactly zeros if the values are equal.
    """
    if not differ(float(values.min()), float(values.max())):
        return np.zeros_like(values)
    counts = np.concatenate(num_tokens)
    centred: Floats64 = values - np.average(values, weights=counts)
    std = np.sqrt(counts @ centred**2 / (counts.sum() - 1))
    return centred / (float(std) + STD_EPS)


def _split(values: Floats64, *, like: Sequence[Floats64]) -> list[Floats64]:
    return np.split(values, np.cumsum([len(group) for group in like])[:-1])


ADVANTAGES: dict[Advantage, BatchAdvantages] = {
    Advantage.grpo: by_group(grpo),
    Advantage.dr_grpo: by_group(dr_grpo),
    Advantage.rloo: by_group(rloo),
    Advantage.reinforce_pp: reinforce_pp,
    Advantage.reinforce_pp_baseline: reinforce_pp_baseline,
}


def credits_of(choice: str, reward: RewardConfig) -> Credits:
    """Return the built-in estimator of that name, for rewards that are made as `reward` says."""

    def weight(scored: ScoredGroup) -> float:
        return reward.environment_weight(scored.group.prompt.dataset)

    if choice == Advantage.grpo_by_turn:
        return lambda groups, rewards: [
            grpo_by_turn(scored.group.samples, of_group, environment_weight=weight(scored))
            for scored, of_group in zip(groups, rewards, strict=True)
        ]
    if choice == Advantage.gdpo:
        weights = {name: function.weight for name, function in reward.functions.items()}
        return lambda groups, _rewards: [
            of_group.tolist() for of_group in gdpo([scored.parts for scored in groups], weights)
        ]
    if choice == Advantage.gae:
        return lambda groups, rewards: [
            [
                token_rewards(sample, paid, environment_weight=weight(scored))
                for sample, paid in zip(scored.group.samples, _check(of_group), strict=True)
            ]
            for scored, of_group in zip(groups, rewards, strict=True)
        ]
    if choice == Advantage.none:
        return lambda _groups, rewards: [[0.0] * len(np.asarray(of_group)) for of_group in rewards]
    estimator = ADVANTAGES[Advantage(choice)]

    def of_groups(groups: Sequence[ScoredGroup], rewards: Sequence[ArrayLike]) -> list[list[float]]:
        num_tokens = [[sample.num_tokens for sample in scored.group.samples] for scored in groups]
        return [of_group.tolist() for of_group in estimator(rewards, num_tokens)]

    return of_groups


def soft_overlong_penalty(
    num_tokens: ArrayLike, *, max_response_tokens: int, buffer_frac: float, penalty: float
) -> NDArray[np.float64]:
    """Return what to add to the rewards of responses of these lengths [G]; Yu et al. 2025 (DAPO),
    eq. 13.

    The buffer is the last `buffer_frac` of max_response_tokens. The result is 0 before it, falls
    linearly through it, and is -penalty at its end. With `buffer_frac` 0 it is always 0.
    """
    lengths = np.asarray(num_tokens, dtype=np.float64)
    if buffer_frac == 0:
        return np.zeros_like(lengths)
    buffer_tokens = buffer_frac * max_response_tokens
    over = lengths - (max_response_tokens - buffer_tokens)
    # np.clip takes several times as long for a small array.
    share: NDArray[np.float64] = np.minimum(np.maximum(over / buffer_tokens, 0.0), 1.0)
    return -penalty * share
