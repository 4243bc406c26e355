"""Episodes of agents that talk to the policy, and a policy whose answers a test chooses."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path

from byte_tokenizer import CHAT, END, hf_byte_tokenizer
from episodes import Limits, answer, environment_pool, fresh, with_turn

from april_rl.config.environment import EnvironmentConfig
from april_rl.task.data.tokenizer import Tokenizer
from april_rl.task.environments.dialogue import Dialogue
from april_rl.task.environments.pool import EnvironmentPool
from april_rl.task.environments.turns import EpisodeRules
from april_rl.types import Observation, Sample


@cache
def tokenizer(chat_template: str = CHAT) -> Tokenizer:
    return Tokenizer(hf_byte_tokenizer(chat_template), path="bytes")


def encode(text: str) -> tuple[int, ...]:
    return tokenizer().encode([text], add_special_tokens=False)[0]


def agents(
    folder: Path,
    *,
    has_tools: bool = True,
    chat_template: str = CHAT,
    limits: Limits = None,
    **changes: object,
) -> closing[EnvironmentPool]:
    """Return the agents of `agent_programs`."""
    settings = {"num_processes": 1, "max_turns": 9, "step_timeout_s": 20.0} | changes
    if "command" not in settings:
        settings = {"function": "agent_programs:run"} | settings
    dialogue = Dialogue(
        tokenizer=tokenizer(chat_template),
        is_chat=True,
        variables={},
        stop_ids=frozenset(encode(END)),
        has_tools=has_tools,
        has_agent=True,
    )
    config = EnvironmentConfig(**settings)  # type: ignore[arg-type]
    rules = EpisodeRules(config=config, dialogue=dialogue, max_response_tokens=9999)
    return environment_pool(config, rules, limits, folder=folder)


def question(text: str, *, reference: str = "20") -> Sample:
    prompt = replace(fresh().prompt, text=text, token_ids=(), answer=reference)
    return Sample(prompt, 0)


def say(sample: Sample, text: str) -> Sample:
    return with_turn(sample, encode(text + END))


def play(pool: EnvironmentPool, sample: Sample, *turns: str) -> tuple[Sample, Observation]:
    """Let the policy say `turns` for as long as it is asked; return the sample and the
    last reply.
    """
    reply = answer(pool, sample)
    for turn in turns:
        if reply.is_final:
            break
        sample = say(sample.with_span(reply), turn)
        reply = answer(pool, sample)
    return sample, reply
