"""Build the reward pool from a checked configuration, after trying its functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from april_rl.config import TrainConfig
from april_rl.config.prompt_sets import training_sets
from april_rl.data.tokenizer import Tokenizer
from april_rl.rewards.check import check_reward
from april_rl.rewards.pool import RewardPool
from april_rl.rewards.trial import RewardTrial
from april_rl.types import Prompt


def reward_columns(
    config: TrainConfig, tokenizer: Tokenizer, *, folder: Path | None
) -> dict[str, tuple[str, ...]]:
    """Return the data columns that the reward functions use, by data set.

    `folder` is the run directory. The reward process ends before data is read, because reading
    forks. Raise RewardError when a function cannot be used.
    """
    with RewardTrial(config.reward, decode=tokenizer.decoder(), folder=folder) as trial:
        names = [*training_sets(config.data), *config.evaluation.sets]
        return {name: trial.columns_of(name) for name in names}


def build_rewards(
    config: TrainConfig,
    tokenizer: Tokenizer,
    examples: Sequence[Prompt],
    *,
    folder: Path | None,
    tell: Callable[[str], None],
) -> RewardPool:
    """Return the reward pool, after calling every function once on each example.

    `examples` has one prompt of each data set; `folder` is the run directory; `tell` gets notes for
    the user. Raise RewardError when a function cannot be used.
    """
    decode = tokenizer.decoder()
    with RewardTrial(config.reward, decode=decode, folder=folder) as trial:
        for note in check_reward(config.reward, trial, examples):
            tell(note)
    return RewardPool(config.reward, decode=decode, folder=folder)
