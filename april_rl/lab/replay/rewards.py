"""The responses of a recorded step, scored again by another reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace

from april_rl.config import TrainConfig
from april_rl.errors import RunError
from april_rl.task.data.tokenizer import load_tokenizer
from april_rl.task.rewards.pool import RewardPool
from april_rl.task.rewards.scorebook import total
from april_rl.training.recorded_steps import RecordedStep
from april_rl.types import Score, ScoredGroup


def scored_again(recorded: RecordedStep, config: TrainConfig) -> RecordedStep:
    """Return the step with what the reward of `config` gives to its responses. Raise RunError
    for responses with an environment, which has their rewards, and for one without a score.
    """
    decode = load_tokenizer(config.model.path).decoder()
    with closing(RewardPool(config.reward, config.user_code, decode=decode)) as rewards:
        groups = [_scored_again(scored, rewards, decode) for scored in recorded.groups]
    return RecordedStep(groups, recorded.probes)


def _scored_again(
    scored: ScoredGroup, rewards: RewardPool, decode: Callable[[Sequence[int]], str]
) -> ScoredGroup:
    prompt = scored.group.prompt
    if prompt.has_environment:
        raise RunError("an environment gives its own rewards: reward.* changes nothing here")
    texts = [decode(sample.token_ids) for sample in scored.group.samples]
    found = [total(rewards.functions, each) for each in rewards.try_on(prompt, texts)]
    values = tuple(map(_value, found))
    return replace(scored, rewards=values, parts=tuple(score.parts for score in found))


def _value(score: Score) -> float:
    if score.value is None:
        raise RunError(f"a response of prompt {score.sample_id.prompt_id}: {score.message}")
    return score.value
