"""Checks of the user's functions: `USER_CODE` before anything is read or started, and
`try_on_groups` with a prompt of the training data.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from april_rl.config import TrainConfig
from april_rl.config.algorithm import AlgorithmConfig
from april_rl.config.choices import Loss
from april_rl.config.user_code import OwnFunctionError, import_function, keywords
from april_rl.start.assembly.own_algorithm import load_advantages, load_group_filter
from april_rl.start.assembly.packer import load_age_weights
from april_rl.task.rewards.functions import reward_functions
from april_rl.types import (
    Completion,
    Group,
    Observation,
    Parts,
    Prompt,
    Sample,
    SampleId,
    ScoredGroup,
    Span,
)


def try_own_functions(config: AlgorithmConfig) -> None:
    """Load what the settings name and try the loss on short responses; raise OwnFunctionError."""
    load_advantages(config)
    load_group_filter(config)
    if config.loss not in Loss.__members__:
        # Imports torch, which the controller needs for this.
        from april_rl.training.learner.own_loss import try_loss

        try_loss(config)
    own = (config.loss, config.advantage, config.group_filter or "")
    taken = [keywords(import_function(each)) for each in own if ":" in each]
    for name in config.args:
        if not any(name in names for names in taken):
            raise OwnFunctionError(f"algorithm.args.{name}: none of your functions takes it")


USER_CODE: tuple[Callable[[TrainConfig], object], ...] = (
    load_age_weights,
    lambda config: try_own_functions(config.algorithm),
)


def try_on_groups(config: TrainConfig, prompt: Prompt) -> None:
    """Call the user's advantages and group filter with two short groups; raise OwnFunctionError."""
    estimate, keep = load_advantages(config.algorithm), load_group_filter(config.algorithm)
    groups = [_made_up_group(config, prompt, first_reward) for first_reward in (0.0, 1.0)]
    if keep is not None:
        for scored in groups:
            keep(scored)
    if estimate is not None:
        estimate(groups, [np.array(scored.rewards) for scored in groups])


def _made_up_group(config: TrainConfig, prompt: Prompt, first_reward: float) -> ScoredGroup:
    """Return a group whose rewards alternate between 0 and 1, for every reward function."""
    size, functions = config.rollout.group_size, reward_functions(config.reward)
    rewards = tuple(abs(first_reward - index % 2) for index in range(size))
    parts: tuple[Parts, ...] = ()
    if len(functions) > 1:
        parts = tuple(tuple((each.name, reward) for each in functions) for reward in rewards)
    samples = tuple(_made_up_sample(prompt, index) for index in range(size))
    return ScoredGroup(group=Group(prompt=prompt, samples=samples), rewards=rewards, parts=parts)


def _made_up_sample(prompt: Prompt, index: int) -> Sample:
    """Return a finished sample of one turn and two or three tokens."""
    num_tokens = 2 + index % 2
    turn = Completion(
        sample_id=SampleId(prompt.id, index),
        start=0,
        policy_version=0,
        context_version=0,
        token_ids=(0,) * num_tokens,
        logprobs=(-0.5,) * num_tokens,
        finish_reason="stop",
    )
    end: tuple[Span, ...] = (Observation((), is_final=True),) if prompt.has_environment else ()
    return Sample(prompt, index, (turn, *end))
