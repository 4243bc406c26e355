"""Build the reward pool from a checked configuration, and try its functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from april_rl.config import TrainConfig
from april_rl.config.prompt_sets import training_sets
from april_rl.start.assembly.environments import columns_of_environment
from april_rl.task.data.tokenizer import Tokenizer
from april_rl.task.environments.loading import Description
from april_rl.task.rewards.check import NUM_ROWS_TRIED, check_reward, check_tests
from april_rl.task.rewards.pool import RewardPool
from april_rl.types import Prompt


def build_rewards(
    config: TrainConfig,
    tokenizer: Tokenizer,
    *,
    folder: Path,
    description: Description,
    stack: ExitStack,
    states: Mapping[str, str] | None = None,
) -> tuple[RewardPool, dict[str, tuple[str, ...]]]:
    """Return the reward pool, and the data columns that the reward functions and the environment
    use, by data set.

    `folder` is the run directory; rewards with a state continue from `states`; closing `stack` ends
    the processes. Raise RewardError when a function cannot be loaded.
    """
    rewards = RewardPool(
        config.reward, config.user_code, decode=tokenizer.decoder(), folder=folder, states=states
    )
    stack.callback(rewards.close)
    names = [*training_sets(config.data), *config.evaluation.sets]
    of_environment = columns_of_environment(config, description)
    return rewards, {
        name: (*rewards.columns_of(name), *of_environment.get(name, ())) for name in names
    }


def try_rewards(
    config: TrainConfig,
    rewards: RewardPool,
    sets: Sequence[Sequence[Prompt]],
    *,
    held_out: Sequence[Sequence[Prompt]] = (),
    tell: Callable[[str], None],
) -> None:
    """Try the tests of some rows of each set, held-out ones too, and call every function once on
    the first prompt of each set; `tell` receives notes for the user. Raise RewardError when a
    row's tests or a function cannot be used.
    """
    for prompts in (*sets, *held_out):
        check_tests(rewards, prompts, most=NUM_ROWS_TRIED)
    for note in check_reward(config.reward, rewards, [prompts[0] for prompts in sets]):
        tell(note)
