"""Advantages and reward shaping."""

import math
import statistics
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from light_samples import following

from april_rl.config.choices import Advantage
from april_rl.config.task import RewardConfig, RewardFunctionConfig
from april_rl.task.rewards.loading import LARGEST
from april_rl.training.algorithm.advantages import (
    ADVANTAGES,
    credits_of,
    dr_grpo,
    gdpo,
    grpo,
    grpo_by_turn,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
    soft_overlong_penalty,
)
from april_rl.types import Group, Observation, Prompt, Sample, ScoredGroup, Span

REWARDS = st.lists(st.floats(-10, 10), min_size=1, max_size=16)


def test_grpo_divides_by_the_sample_standard_deviation():
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0]
    scale = statistics.stdev(rewards) + 1e-6
    assert grpo(rewards) == pytest.approx([(r - 0.6) / scale for r in rewards])


def test_dr_grpo_subtracts_the_mean_and_does_not_divide():
    assert dr_grpo([3.0, 0.0, 0.0, 1.0]) == pytest.approx([2.0, -1.0, -1.0, 0.0])


def test_rloo_subtracts_the_mean_of_the_other_samples():
    """Planted bug: the sample itself is in its baseline."""
    rewards = [1.0, 0.0, 0.25, 1.0]
    others = [statistics.mean(rewards[:i] + rewards[i + 1 :]) for i in range(4)]
    assert rloo(rewards) == pytest.approx([r - o for r, o in zip(rewards, others, strict=True)])


def over_tokens(values: list[float], num_tokens: list[int]) -> list[float]:
    """Treat every token as an observation: repeat each value for its tokens, subtract their mean,
    and divide by their standard deviation.
    """
    every = [value for value, count in zip(values, num_tokens, strict=True) for _ in range(count)]
    mean, scale = statistics.mean(every), statistics.stdev(every) + 1e-6
    return [(value - mean) / scale for value in values]


def test_reinforce_pp_takes_mean_and_spread_from_the_tokens_of_the_whole_batch():
    """Groups of different size; a group of equal rewards has a signal here. Planted bugs: by group;
    every sample counts once.
    """
    groups, num_tokens = [[1.0, 0.0], [1.0, 1.0, 1.0]], [[2, 7], [1, 1, 5]]
    expected = over_tokens([1.0, 0.0, 1.0, 1.0, 1.0], [2, 7, 1, 1, 5])
    first, second = reinforce_pp(groups, num_tokens)
    assert [*first, *second] == pytest.approx(expected)
    assert second[0] > 0


def test_reinforce_pp_with_baseline_takes_the_mean_by_group_and_then_whitens_over_tokens():
    """Planted bugs: the standard deviation by group, which is `grpo`; the mean over tokens is not
    subtracted.
    """
    groups, num_tokens = [[1.0, 0.0], [0.2, 0.4], [0.7, 0.7, 0.7]], [[2, 7], [3, 1], [1, 1, 5]]
    centred = [0.5, -0.5, -0.1, 0.1, 0.0, 0.0, 0.0]
    found = np.concatenate(reinforce_pp_baseline(groups, num_tokens))
    assert found == pytest.approx(over_tokens(centred, [2, 7, 3, 1, 1, 1, 5]))
    assert np.concatenate(num_tokens) @ found == pytest.approx(0)


@pytest.mark.parametrize("estimator", [reinforce_pp, reinforce_pp_baseline])
def test_over_the_batch_equal_rewards_have_exactly_zero_advantage(estimator):
    """Equal up to rounding. With responses of equal length, tokens count like samples."""
    for found in estimator([[0.3, 0.1 + 0.2], [0.3]], [[1, 5], [2]]):
        assert found.tolist() == [0.0] * len(found)
    rewards = [0.0, 1.0, 1.0, 0.5]
    [found] = estimator([rewards], [[3] * 4])
    assert found == pytest.approx(over_tokens(rewards, [3] * 4))


def test_the_tokens_of_a_batch_match_its_samples():
    """Observation tokens do not count. Planted bug: the length includes observations."""
    samples = [episode((2, "stop"), 0.0), episode((5, "stop"), 0.0, index=1)]
    expected = over_tokens([1.0, 0.0], [2, 5])
    estimator = credits_of(Advantage.reinforce_pp, RewardConfig())
    [found] = estimator([scored(samples)], [[1.0, 0.0]])
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("choice", ADVANTAGES)
def test_a_batch_keeps_its_groups_apart_and_in_order(choice):
    """Planted bug: groups are split at equal sizes."""
    groups = [[1.0, 0.0, 0.0], [0.5], [2.0, 0.0]]
    found = ADVANTAGES[choice](groups, [[1, 2, 3], [4], [1, 1]])
    assert [len(advantages) for advantages in found] == [3, 1, 2]
    assert [advantages.argmax() for advantages in found] == [0, 0, 0]


def test_a_nan_reward_is_refused():
    with pytest.raises(AssertionError, match="must be a number"):
        grpo([1.0, math.nan])


@pytest.mark.parametrize("advantages", [grpo, dr_grpo, rloo])
def test_the_largest_rewards_have_the_advantages_of_small_ones(advantages):
    found = advantages([0.0, LARGEST, -LARGEST, LARGEST])
    scale = 1.0 if advantages is grpo else LARGEST
    expected = advantages([0.0, 1.0, -1.0, 1.0]) * scale
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5 * scale)
    assert np.isfinite(found.astype(np.float32)).all()


@given(REWARDS)
def test_advantages_are_finite_and_sum_to_zero(rewards):
    for advantages in (grpo(rewards), dr_grpo(rewards), rloo(rewards)):
        assert np.isfinite(advantages).all()
        assert math.isclose(advantages.sum(), 0.0, abs_tol=1e-6)


def test_the_overlong_penalty_falls_linearly_through_the_buffer_and_stays_at_its_end():
    penalty = soft_overlong_penalty(
        [0, 80, 81, 90, 100, 150], max_response_tokens=100, buffer_frac=0.2, penalty=0.5
    )
    assert penalty == pytest.approx([0.0, 0.0, -0.025, -0.25, -0.5, -0.5])


def test_an_overlong_buffer_of_zero_turns_the_penalty_off():
    penalty = soft_overlong_penalty(
        [1, 100, 150], max_response_tokens=100, buffer_frac=0, penalty=1.0
    )
    assert penalty.tolist() == [0.0, 0.0, 0.0]


# Advantages of several reward functions.


def gdpo_by_loops(groups: list[list[dict[str, float]]], weights: dict[str, float]) -> list[float]:
    """Compute the formula of the paper one sample at a time; return a value for each sample of all
    groups.
    """
    sums = []
    for group in groups:
        for sample in group:
            total = 0.0
            for name, value in sample.items():
                of_group = [other[name] for other in group]
                scale = statistics.stdev(of_group) + 1e-6
                total += weights[name] * (value - statistics.fmean(of_group)) / scale
            sums.append(total)
    mean, scale = statistics.fmean(sums), statistics.stdev(sums) + 1e-6
    return [(total - mean) / scale for total in sums]


def test_gdpo_scales_each_function_by_group_and_their_weighted_sum_over_the_batch():
    """Groups of different size, a function that does not score the second one, and responses of
    different length. Planted bugs: the sum of the weighted values is scaled; a function has no
    weight; the sum is scaled by group; mean and standard deviation over tokens.
    """
    rng = np.random.default_rng(0)
    names = [["right", "short", "form"]] * 4 + [["right", "form"]] * 2 + [["form", "right"]] * 5
    drawn = [{name: float(rng.normal(scale=5.0)) for name in of_sample} for of_sample in names]
    groups = [drawn[:4], drawn[4:6], drawn[6:]]
    weights = {"right": 1.0, "form": 0.25, "short": -0.5}
    reward = RewardConfig(
        functions={
            name: RewardFunctionConfig(function="length", weight=weight)
            for name, weight in weights.items()
        }
    )
    built = [
        [episode((2 + 3 * number, "stop"), 0.0, index=number) for number in range(len(group))]
        for group in groups
    ]
    found = credits_of(Advantage.gdpo, reward)(
        [scored(samples, group) for samples, group in zip(built, groups, strict=True)],
        [[0.0] * len(group) for group in groups],
    )
    assert [len(of_group) for of_group in found] == [4, 2, 5]
    assert np.concatenate(found) == pytest.approx(gdpo_by_loops(groups, weights), rel=1e-12)


def test_gdpo_distinguishes_samples_of_equal_reward_and_ignores_a_constant_function():
    """The first function is right for one sample and the second for another. If all values are
    equal, advantages are zero.
    """
    parts = [(("a", 1.0), ("b", 0.0)), (("a", 0.0), ("b", 1.0)), (("a", 0.0), ("b", 0.0))]
    [found] = gdpo([parts], {"a": 1.0, "b": 0.5})
    assert found[0] > found[1] > found[2]
    for flat in ([parts[0]] * 3, [()] * 3):
        assert [each.tolist() for each in gdpo([flat], {"a": 1.0, "b": 0.5})] == [[0.0] * 3]


# Advantages of turns.


def scored(samples: list[Sample], parts: Sequence[dict[str, float]] = ()) -> ScoredGroup:
    return ScoredGroup(
        group=Group(prompt=samples[0].prompt, samples=tuple(samples)),
        rewards=(0.0,) * len(samples),
        parts=tuple(tuple(values.items()) for values in parts),
    )


def episode(*spans: tuple[int, str | None] | float, index: int = 0) -> Sample:
    """Build an episode. A pair is a completion with its tokens and finish reason; a number is the
    reward of an observation of one token, the last one final.
    """
    prompt = Prompt(id=0, token_ids=(1,), text="", answer="", source="rows:1", has_environment=True)
    built: list[Span] = [Observation((9,))]
    for number, span in enumerate(spans):
        if isinstance(span, float):
            built.append(Observation((9,), is_final=number == len(spans) - 1, reward=span))
            continue
        tokens, reason = span
        so_far = Sample(prompt, index, tuple(built))
        built.append(following(so_far, (5,) * tokens, finish_reason=reason))
    return Sample(prompt, index, tuple(built))


def test_the_advantage_of_a_token_sums_its_turn_and_later_turns():
    """A parked turn is one turn, and reward beyond the environment's belongs to the last turn.
    Planted bugs: a turn for each completion; the sum of earlier turns; the mean over each sample's
    own turns.
    """
    parked = episode((2, None), (1, "stop"), 0.5, (2, "stop"), 1.0)
    short = episode((4, "stop"), 0.0, index=1)
    rewards = [1.5, -0.25]  # a penalty of a quarter for the second
    earned = [0.5, 1.0, -0.25]
    mean, scale = statistics.mean(earned), statistics.stdev(earned) + 1e-6
    first, last, only = ((value - mean) / scale for value in earned)
    found = grpo_by_turn([parked, short], rewards, environment_weight=1.0)
    assert found[0] == pytest.approx([first + last] * 3 + [last] * 2)
    assert found[1] == pytest.approx([only] * 4)


def test_a_critic_gets_each_turns_reward_at_its_last_token():
    """A parked turn is one turn; the environment's rewards have their weight, and the rest belongs
    to the last turn.
    """
    samples = (episode((2, None), (1, "stop"), 0.5, (2, "stop"), 1.0), episode((2, "stop"), 1.0))
    reward = RewardConfig(
        functions={
            "environment": RewardFunctionConfig(function="environment", weight=2.0),
            "exact": RewardFunctionConfig(function="exact"),
        }
    )
    [[first, second]] = credits_of(Advantage.gae, reward)([scored(samples)], [[3.5, 2.0]])
    assert first.tolist() == [0, 0, 1.0, 0, 2.5]
    assert second.tolist() == [0, 2.0]


@pytest.mark.parametrize("weight", [0.1, 1.0, 10.0, -2.0])
def test_equal_rewards_in_later_turns_give_equal_advantages_there_with_any_weight(weight):
    """Scaling the whole reward changes only the sign of an advantage. Planted bug: a turn gets the
    environment's reward without its weight, and the last turn takes the difference back.
    """
    samples = [
        episode((2, "stop"), first, (2, "stop"), 0.25, (2, "stop"), 0.5, index=number)
        for number, first in enumerate([1.0, 0.0])
    ]
    rewards = [weight * sample.environment_reward for sample in samples]
    function = RewardFunctionConfig(function="environment", weight=weight)
    reward = RewardConfig(functions={"game": function})
    [[one, other]] = credits_of(Advantage.grpo_by_turn, reward)([scored(samples)], [rewards])
    assert one[2:] == pytest.approx(other[2:], abs=1e-9)
    scale = statistics.stdev([1.0, 0.25, 0.5, 0.0, 0.25, 0.5])
    assert one[0] - other[0] == pytest.approx(math.copysign(1 / scale, weight), rel=1e-3)


@given(st.lists(st.tuples(st.integers(1, 5), st.floats(-10, 10)), min_size=1, max_size=8))
def test_samples_of_one_turn_have_the_advantages_of_grpo(samples):
    """Whether the environment or a reward function gave the reward."""
    built = [
        episode((tokens, "stop"), reward if number % 2 else 0.0, index=number)
        for number, (tokens, reward) in enumerate(samples)
    ]
    rewards = [reward for _, reward in samples]
    by_turn = credits_of(Advantage.grpo_by_turn, RewardConfig(function="environment"))
    [found] = by_turn([scored(built)], [rewards])
    for sample, of_tokens, expected in zip(built, found, grpo(rewards), strict=True):
        assert of_tokens == pytest.approx([expected] * sample.num_tokens)
