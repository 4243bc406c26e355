"""Sampling settings of each set of `evaluation.sets`, with defaults filled in."""

from __future__ import annotations

from dataclasses import dataclass

from april_rl.config import TrainConfig
from april_rl.config.task import EvaluationSetConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SetSampling:
    """Sampling settings of a held-out set; every figure depends on all of them."""

    num_samples: int  # k: samples of each prompt
    temperature: float
    top_p: float
    max_response_tokens: int
    max_prompts: int | None  # number of the set's first prompts to use; None: all


def set_sampling(config: TrainConfig, chosen: EvaluationSetConfig) -> SetSampling:
    """Return a set's settings; missing ones come from `evaluation`, then from `rollout`."""
    general, rollout = config.evaluation, config.rollout
    temperature = _first(chosen.temperature, general.temperature, rollout.temperature)
    budgets = (chosen.max_response_tokens, general.max_response_tokens, rollout.max_response_tokens)
    limit = chosen.max_prompts or general.max_prompts
    return SetSampling(
        num_samples=int(_first(chosen.num_samples, general.num_samples)),
        temperature=temperature,
        top_p=_first(chosen.top_p, general.top_p),
        max_response_tokens=int(_first(*budgets)),
        max_prompts=None if isinstance(limit, str) else limit,  # all
    )


def longest_response(config: TrainConfig, *, is_training: bool) -> tuple[int, str]:
    """Return the longest response in tokens, of evaluations and optionally of training, and the
    setting that allows it.
    """
    general = (config.rollout.max_response_tokens, "rollout.max_response_tokens")
    budgets = [general] if is_training else []
    for name, chosen in config.evaluation.sets.items():
        if chosen.max_response_tokens:
            key = f"evaluation.sets.{name}.max_response_tokens"
            budgets.append((chosen.max_response_tokens, key))
        elif config.evaluation.max_response_tokens:
            key = "evaluation.max_response_tokens"
            budgets.append((config.evaluation.max_response_tokens, key))
        else:
            budgets.append(general)
    return max(budgets, key=lambda budget: budget[0])  # on a tie, the first one


def _first(*values: float | None) -> float:
    """Return the first value that is not None; the last one always has a value."""
    return next(value for value in values if value is not None)
