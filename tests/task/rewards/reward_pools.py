"""Reward pools of the tests."""

from __future__ import annotations

from contextlib import closing

from character_decoder import characters

from april_rl.config.runtime import UserCodeConfig
from april_rl.task.rewards.loading import RewardContext
from april_rl.task.rewards.pool import RewardPool

CONTEXT = RewardContext(
    extract="auto", soft_timeout_s=3.0, hard_timeout_s=20.0, num_processes=1, folder=None
)


def reward_pool(reward, *, limits=None, decode=characters, **more):
    """Return a pool to be used in a `with`; `limits` are settings of `user_code`."""
    return closing(RewardPool(reward, UserCodeConfig(**(limits or {})), decode=decode, **more))
