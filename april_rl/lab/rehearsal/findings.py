"""Checks of a rehearsal; each is a pure function that yields at most one finding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from april_rl.config import TrainConfig
from april_rl.config.choices import Ratio
from april_rl.lab.price.assumptions import Assumptions
from april_rl.lab.simulator.length_distributions import median_for
from april_rl.task.data.prompts import PromptTable

_MAX_OVERLONG_FRAC = 0.25  # share of the responses in the zone of the overlong penalty
_MAX_LEFT_OUT_FRAC = 0.05  # share of the prompts that are longer than data.max_prompt_tokens
_MAX_DUPLICATE_FRAC = 0.01  # share of the rows


class Finding(NamedTuple):
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


def check_overlong_zone(config: TrainConfig, assumed: Assumptions) -> Iterator[Finding]:
    """Find an overlong penalty that would affect many of the responses that are assumed."""
    share, budget = config.algorithm.overlong_buffer_frac, config.rollout.max_response_tokens
    begin = (1 - share) * budget
    if share and (inside := share_longer_than(begin, config, assumed)) > _MAX_OVERLONG_FRAC:
        yield Finding(
            "overlong_zone",
            f"{inside:.0%} of the responses are expected in the zone of the overlong penalty, "
            f"which begins at {begin:,.0f} tokens (mean {assumed.response_tokens(config):,.0f}, "
            f"mean_response_tokens): raise rollout.max_response_tokens={budget}, so that the zone "
            f"begins above most responses, or lower algorithm.overlong_buffer_frac={share:g}",
        )


def check_overlong_penalty(config: TrainConfig, *, reward_span: float) -> Iterator[Finding]:
    """Find an overlong penalty of more than half of the reward of a right answer.

    DAPO takes 1 off rewards of -1 and 1 (Yu et al. 2025, eq. 7 and 13): half of their span.
    """
    penalty = config.algorithm.overlong_penalty
    if config.algorithm.overlong_buffer_frac and penalty > 0.5 * reward_span + 1e-9:
        yield Finding(
            "overlong_penalty",
            f"algorithm.overlong_penalty={penalty:g} takes more than half of what a right answer "
            f"gains ({reward_span:g}): a right answer at the limit would count as little as a "
            f"wrong one; DAPO's half is {reward_span / 2:g}",
        )


def check_one_update(config: TrainConfig) -> Iterator[Finding]:
    """Find clipping that never acts, because a batch is used for one update."""
    num_updates = config.trainer.num_minibatches * config.trainer.num_passes
    if num_updates == 1 and config.algorithm.ratio is Ratio.proximal:
        yield Finding(
            "one_update",
            "trainer.num_minibatches=1 with algorithm.ratio=proximal makes every ratio 1: "
            "clip_low, clip_high, dual_clip and GSPO's sequence ratio never act, loss/clip_frac "
            "stays 0; set trainer.num_minibatches above 1, or accept=one_update if one update is "
            "meant",
        )


def check_duplicates(
    config: TrainConfig, table: PromptTable, *, set_name: str
) -> Iterator[Finding]:
    """Find a training set that repeats its prompts and is not deduplicated."""
    num = table.num_duplicates
    if not config.data.deduplicate and num > _MAX_DUPLICATE_FRAC * table.num_rows:
        yield Finding(
            "duplicates",
            f"{set_name}: {num:,} of {table.num_rows:,} rows repeat another one's prompt and "
            "answer, and data.deduplicate=false keeps them, so that an epoch repeats prompts",
        )


def check_left_out(config: TrainConfig, table: PromptTable, *, set_name: str) -> Iterator[Finding]:
    """Find a limit on prompt lengths that leaves out many prompts."""
    num_prompts = len(table.all_lengths)
    num_left_out = num_prompts - len(table)
    if num_left_out > _MAX_LEFT_OUT_FRAC * num_prompts:
        yield Finding(
            "prompts_left_out",
            f"{set_name}: {num_left_out:,} of {num_prompts:,} prompts are longer "
            f"than data.max_prompt_tokens={config.data.max_prompt_tokens} and left out",
        )


def check_evaluation(config: TrainConfig) -> Iterator[Finding]:
    """Find a run without evaluation, whose progress no metric would show."""
    if not config.evaluation.sets:
        text = "evaluation.sets is empty: the run would show nothing but its training reward"
        yield Finding("no_evaluation", text)
