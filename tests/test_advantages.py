"""Advantages and reward shaping."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from april_rl.algorithm.advantages import dr_grpo, grpo
from april_rl.algorithm.shaping import soft_overlong_penalty

REWARDS = st.lists(st.floats(-10, 10), min_size=1, max_size=16)


def test_grpo_divides_by_the_sample_standard_deviation():
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0]
    scale = statistics.stdev(rewards) + 1e-6
    assert grpo(rewards) == pytest.approx([(r - 0.6) / scale for r in rewards])


def test_dr_grpo_only_takes_the_mean_off():
    assert dr_grpo([3.0, 0.0, 0.0, 1.0]) == pytest.approx([2.0, -1.0, -1.0, 0.0])


@pytest.mark.parametrize("advantages", [grpo, dr_grpo])
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.7] * 7, [1.0]])
def test_equal_rewards_and_a_group_of_one_have_exactly_zero_advantage(advantages, rewards):
    assert advantages(rewards).tolist() == [0.0] * len(rewards)


@given(REWARDS)
def test_advantages_are_finite_and_sum_to_zero(rewards):
    for advantages in (grpo(rewards), dr_grpo(rewards)):
        assert np.isfinite(advantages).all()
        assert math.isclose(advantages.sum(), 0.0, abs_tol=1e-6)


def test_the_overlong_penalty_falls_linearly_through_the_buffer_and_stays_at_its_end():
    penalty = soft_overlong_penalty(
        [0, 80, 81, 90, 100, 150], max_response_tokens=100, buffer_tokens=20, penalty=0.5
    )
    assert penalty == pytest.approx([0.0, 0.0, -0.025, -0.25, -0.5, -0.5])


def test_a_buffer_of_no_tokens_turns_the_overlong_penalty_off():
    penalty = soft_overlong_penalty(
        [1, 100, 150], max_response_tokens=100, buffer_tokens=0, penalty=1.0
    )
    assert penalty.tolist() == [0.0, 0.0, 0.0]
