"""Sizes that follow from the settings: samples in flight, context length, requests of an engine."""

from __future__ import annotations

import math
from typing import NamedTuple

from april_rl.config import TrainConfig
from april_rl.errors import RunError
from april_rl.task.evaluation.settings import longest_response
from april_rl.training.rollout.dispatch import auto_tick_steps
from april_rl.training.runtime.layout import Layout

_MOST_SEQS = 256  # requests that an engine computes together in an evaluation, at most


class Sizes(NamedTuple):
    """Numbers of a run that several of its parts use."""

    num_slots: int  # samples in flight over all engines
    max_num_seqs: int  # requests that one engine computes together, at most
    max_model_len: int  # tokens of a prompt and its response, at most
    batch_tokens: int = 0  # tokens of the prompts and responses that a step trains, at most


def num_slots(config: TrainConfig) -> int:
    """Return the samples in flight over all engines, round(α·N·G)."""
    rollout = config.rollout
    return round(rollout.over_sampling_factor * config.trainer.num_groups * rollout.group_size)


def tick_steps(config: TrainConfig, *, num_engines: int) -> int:
    """Return the number of engine steps in a tick."""
    rollout = config.rollout
    if not isinstance(rollout.tick_steps, str):
        return rollout.tick_steps
    return auto_tick_steps(
        num_engines=num_engines,
        max_response_tokens=rollout.max_response_tokens,
        has_turns=config.environment.is_set,
    )


def context_length(config: TrainConfig, *, is_training: bool = True) -> tuple[int, str]:
    """Return the largest number of tokens of a prompt and its response, and the setting that sets
    it; without `is_training`, of evaluation sets only. Raise RunError when engine.max_model_len is
    less.
    """
    budget, key = longest_response(config, is_training=is_training)
    longest, key = config.data.max_prompt_tokens + budget, f"data.max_prompt_tokens + {key}"
    if config.observation_tokens:
        longest += config.observation_tokens
        key += " + environment.max_observation_tokens"
    given = config.engine.max_model_len
    if isinstance(given, str):  # auto
        return longest, key
    if given < longest:
        raise RunError(f"engine.max_model_len must be auto or >= {key} = {longest}, got {given}")
    return given, "engine.max_model_len"


def training_sizes(config: TrainConfig, layout: Layout) -> Sizes:
    """Return the sizes of a training; raise RunError if engine.max_num_seqs is below its slots."""
    total, num_seqs = num_slots(config), config.engine.max_num_seqs
    slots = math.ceil(total / layout.num_engines)
    if isinstance(num_seqs, str):  # auto
        num_seqs = slots
    if num_seqs < slots:
        raise RunError(
            f"engine.max_num_seqs={num_seqs} is less than the {slots} samples "
            "that rollout.over_sampling_factor · trainer.num_groups · rollout.group_size puts in "
            "flight on each engine: set it to auto, or lower one of these"
        )
    return Sizes(total, num_seqs, context_length(config)[0], batch_tokens(config))


def evaluation_sizes(config: TrainConfig, layout: Layout, *, num_responses: int) -> Sizes:
    """Return the sizes of an evaluation whose largest set has `num_responses` responses."""
    num_seqs = config.engine.max_num_seqs
    if isinstance(num_seqs, str):  # auto
        num_seqs = min(_MOST_SEQS, math.ceil(num_responses / layout.num_engines))
    longest, _ = context_length(config, is_training=False)
    return Sizes(num_seqs * layout.num_engines, num_seqs, longest)


def batch_tokens(config: TrainConfig) -> int:
    """Return the tokens of a step whose samples all have full length."""
    return config.trainer.num_groups * config.rollout.group_size * context_length(config)[0]
