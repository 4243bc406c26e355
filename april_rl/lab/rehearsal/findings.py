"""Checks of a rehearsal; each is a pure function that returns at most one finding."""

from __future__ import annotations

import math
from dataclasses import dataclass

from april_rl.config import TrainConfig
from april_rl.config.choices import Ratio
from april_rl.lab.price.assumptions import Assumptions
from april_rl.lab.simulator.length_distributions import median_for
from april_rl.task.data.prompts import PromptTable

_MAX_OVERLONG_FRAC = 0.25  # share of the responses in the zone of the overlong penalty
_MAX_LEFT_OUT_FRAC = 0.05  # share of the prompts that are longer than data.max_prompt_tokens
_MAX_DUPLICATE_FRAC = 0.01  # share of the rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem to fix, or to accept by its name: accept=NAME."""

    name: str
    message: str


def share_longer_than(tokens: float, config: TrainConfig, assumed: Assumptions) -> float:
    """Return the share of responses longer than `tokens`, for lognormal lengths with the mean and
    the deviation that are assumed.
    """
    mean, cap = assumed.response_tokens(config), config.rollout.max_response_tokens
    median = median_for(mean, sigma=assumed.sigma, cap=cap)
    return 0.5 * math.erfc(math.log(tokens / median) / (assumed.sigma * math.sqrt(2)))


def check_overlong_zone(config: TrainConfig, assumed: Assumptions) -> Finding | None:
    """Find an overlong penalty that would affect many of the responses that are assumed."""
    share = config.algorithm.overlong_buffer_frac
    if not share:
        return None
    budget = config.rollout.max_response_tokens
    begin = (1 - share) * budget
    mean = assumed.response_tokens(config)
    inside = share_longer_than(begin, config, assumed)
    if inside <= _MAX_OVERLONG_FRAC:
        return None
    return Finding(
        name="overlong_zone",
        message=f"{inside:.0%} of the responses are expected in the zone of the overlong penalty, "
        f"which begins at {begin:,.0f} tokens (mean {mean:,.0f}, mean_response_tokens): raise "
        f"rollout.max_response_tokens={budget}, so that the zone begins above most "
        f"responses, or lower algorithm.overlong_buffer_frac={share:g}",
    )


def check_overlong_penalty(config: TrainConfig, *, reward_span: float) -> Finding | None:
    """Find an overlong penalty of more than half of the reward of a right answer.

    DAPO takes 1 off rewards of -1 and 1 (Yu et al. 2025, eq. 7 and 13): half of their span.
    """
    algorithm = config.algorithm
    if not algorithm.overlong_buffer_frac or algorithm.overlong_penalty <= 0.5 * reward_span + 1e-9:
        return None
    return Finding(
        name="overlong_penalty",
        message=f"algorithm.overlong_penalty={algorithm.overlong_penalty:g} takes more than half "
        f"of what a right answer gains ({reward_span:g}): a right answer at the limit would count "
        f"as little as a wrong one; DAPO's half is {reward_span / 2:g}",
    )


def check_one_update(config: TrainConfig) -> Finding | None:
    """Find clipping that never acts, because a batch is used for one update."""
    num_updates = config.trainer.num_minibatches * config.trainer.num_passes
    if num_updates > 1 or config.algorithm.ratio is not Ratio.proximal:
        return None
    return Finding(
        name="one_update",
        message="trainer.num_minibatches=1 with algorithm.ratio=proximal makes every ratio 1: "
        "clip_low, clip_high, dual_clip and GSPO's sequence ratio never act, loss/clip_frac stays "
        "0; set trainer.num_minibatches above 1, or accept=one_update if one update is meant",
    )


def check_duplicates(config: TrainConfig, table: PromptTable, *, set_name: str) -> Finding | None:
    """Find a training set that repeats its prompts and is not deduplicated."""
    if config.data.deduplicate or table.num_duplicates <= _MAX_DUPLICATE_FRAC * table.num_rows:
        return None
    return Finding(
        name="duplicates",
        message=f"{set_name}: {table.num_duplicates:,} of {table.num_rows:,} rows repeat another "
        "one's prompt and answer, and data.deduplicate=false keeps them, so that an epoch repeats "
        "prompts",
    )


def check_left_out(config: TrainConfig, table: PromptTable, *, set_name: str) -> Finding | None:
    """Find a limit on prompt lengths that leaves out many prompts."""
    num_prompts = len(table.all_lengths)
    num_left_out = num_prompts - len(table)
    if num_left_out <= _MAX_LEFT_OUT_FRAC * num_prompts:
        return None
    return Finding(
        name="prompts_left_out",
        message=f"{set_name}: {num_left_out:,} of {num_prompts:,} prompts are longer "
        f"than data.max_prompt_tokens={config.data.max_prompt_tokens} and left out",
    )


def check_evaluation(config: TrainConfig) -> Finding | None:
    """Find a run without evaluation, whose progress no metric would show."""
    if config.evaluation.sets:
        return None
    return Finding(
        name="no_evaluation",
        message="evaluation.sets is empty: the run would show nothing but its training reward",
    )
