"""A pool of environments for prompts of the tiny policy, and samples with turns."""

from __future__ import annotations

from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

from light_samples import following

import april_rl.task.tiny
from april_rl.config.environment import EnvironmentConfig
from april_rl.config.runtime import UserCodeConfig
from april_rl.task.data.tokenizer import Tokenizer, load_tokenizer
from april_rl.task.environments.dialogue import Dialogue
from april_rl.task.environments.pool import EnvironmentPool
from april_rl.task.environments.turns import EpisodeRules
from april_rl.task.processes.mailbox import Mailbox
from april_rl.types import FinishReason, Observation, Prompt, Reply, Sample

Limits = dict[str, Any] | None
EOS = 1
_NOWHERE = Path("/nowhere")  # for environments that make no calls


@cache
def tiny_tokenizer() -> Tokenizer:
    return load_tokenizer(str(Path(april_rl.task.tiny.__file__).parent / "policy"))


def plain() -> Dialogue:
    """Return a dialogue without a template."""
    return Dialogue(
        tokenizer=tiny_tokenizer(), is_chat=False, variables={}, stop_ids=frozenset({EOS})
    )


def environment_pool(
    config: EnvironmentConfig, rules: EpisodeRules, limits: Limits = None, **more: Any
) -> closing[EnvironmentPool]:
    """Return a pool to be used in a `with`; `limits` are settings of `user_code`."""
    code = UserCodeConfig(**(limits or {}))
    return closing(EnvironmentPool(config, code, {"": rules}, seed=0, mailbox=Mailbox(), **more))


def pool(
    name: str = "Told",
    *,
    budget: int = 1000,
    folder: Path = _NOWHERE,
    num_saves: int = 1,
    limits: Limits = None,
    **changes: object,
) -> closing[EnvironmentPool]:
    """Return the environments of a class of `environment_classes`."""
    settings = {"num_processes": 1, "step_timeout_s": 20.0, "max_turns": 9} | changes
    config = EnvironmentConfig(function=f"environment_classes:{name}", **settings)  # type: ignore[arg-type]
    rules = EpisodeRules(config=config, dialogue=plain(), max_response_tokens=budget)
    return environment_pool(config, rules, limits, folder=folder, num_saves=num_saves)


def fresh(number: int = 0, *, index: int = 0, opening: str = "", notes: object = "") -> Sample:
    """Return a sample that has not begun; the file `notes` gets the calls."""
    prompt = Prompt(
        id=number,
        token_ids=(20,),
        text=f"q|{opening}",
        answer=str(notes),
        source="f:1",
        has_environment=True,
    )
    return Sample(prompt, index)


def say(sample: Sample, text: str, *, finish_reason: FinishReason = "stop") -> Sample:
    """Return the sample after another turn of the policy."""
    (token_ids,) = tiny_tokenizer().encode([text], add_special_tokens=False)
    assert tiny_tokenizer().decode(token_ids) == text, "the tiny policy has no such symbols"
    return with_turn(sample, (*token_ids, EOS), finish_reason=finish_reason)


def with_turn(
    sample: Sample, token_ids: tuple[int, ...], *, finish_reason: FinishReason = "stop"
) -> Sample:
    """Return the sample after a turn of these tokens."""
    logprobs = (-0.5,) * len(token_ids)
    return sample.with_span(
        following(sample, token_ids, logprobs=logprobs, finish_reason=finish_reason)
    )


def answers(environments: EnvironmentPool, *samples: Sample) -> list[Reply]:
    """Return the replies to samples that are submitted together."""
    for sample in samples:
        environments.act(sample)
    return environments.mailbox.collect((environments,), None)


def answer(environments: EnvironmentPool, sample: Sample) -> Observation:
    """Return the reply to one sample."""
    (reply,) = answers(environments, sample)
    assert (reply.sample_id, reply.start) == (sample.id, sample.end)
    return reply.observation


def hear(environments: EnvironmentPool, sample: Sample) -> Sample:
    """Return the sample after the reply to it."""
    return sample.with_span(answer(environments, sample))


def text_of(observation: Observation) -> str:
    return tiny_tokenizer().decode(observation.token_ids)
