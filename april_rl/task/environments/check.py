"""Try an environment before training starts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from april_rl.task.data.tokenizer import TokenizerError
from april_rl.task.environments.calls import path_of
from april_rl.task.environments.pool import EnvironmentPool
from april_rl.task.environments.protocol import EnvironmentFailedError
from april_rl.types import Completion, Observation, Prompt, Sample

_TRIAL = -(1 << 40)  # an id that no prompt of a run has


def check_environment(pool: EnvironmentPool, examples: Iterable[Prompt]) -> None:
    """Try an episode for each example with its answer; raise EnvironmentFailedError."""
    for place, example in enumerate(examples):
        begun = Sample(replace(example, id=_TRIAL - place), 0)
        notes = path_of(pool.folder, begun.id, example.dataset)
        notes.unlink(missing_ok=True)  # remove the notes of the last start
        begun = begun.with_span(_observation(pool, begun, "reset"))
        token_ids = pool.rules[example.dataset].dialogue.turn_of(example.answer)
        turn = Completion(
            sample_id=begun.id,
            start=begun.end,
            policy_version=0,
            context_version=0,
            token_ids=token_ids,
            logprobs=[0.0] * len(token_ids),
            finish_reason="stop",
        )
        _observation(pool, begun.with_span(turn), "step")
        pool.forget(begun.id)
        notes.unlink(missing_ok=True)
        _check_following(pool, example)
    pool.metrics()  # discard the counts of the trial


def _check_following(pool: EnvironmentPool, example: Prompt) -> None:
    dialogue = pool.rules[example.dataset].dialogue
    # An agent declares its tools later, so it is not checked here.
    has_tools = dialogue.has_tools and not dialogue.has_agent
    roles = ("user", "tool") if has_tools else ("user",)
    for role in roles:
        try:
            dialogue.following([{"role": role, "name": "tool", "content": "1"}])
        except TokenizerError as error:
            raise EnvironmentFailedError(
                f"{pool.setting}: the chat template cannot place a message of the role {role} "
                f"after a turn: {error}"
            ) from error


def _observation(pool: EnvironmentPool, sample: Sample, method: str) -> Observation:
    pool.act(sample)
    (reply,) = pool.mailbox.collect((pool,), None)
    if reply.observation.failure:
        has_agent = pool.rules[sample.prompt.dataset].dialogue.has_agent
        what = "the agent was tried" if has_agent else f"`{method}` was called as a test"
        raise EnvironmentFailedError(
            f"{pool.setting}: {reply.observation.failure}, when {what} ({sample.prompt.source})"
        )
    observation: Observation = reply.observation
    return observation
