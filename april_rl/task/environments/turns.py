"""A sample as its environment sees it: row, seed and turns as text. Also the observations that the
environment adds to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from april_rl.config.environment import EnvironmentConfig
from april_rl.task.environments.dialogue import Dialogue
from april_rl.task.environments.protocol import StepResult, Turn
from april_rl.types import Completion, Observation, Prompt, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRules:
    """Limits of the episodes of a data set, and the form of their text."""

    config: EnvironmentConfig
    dialogue: Dialogue
    max_response_tokens: int


def turns_of(sample: Sample, rules: EpisodeRules, *, last_alone: bool) -> tuple[Turn, ...]:
    """Return the turns of a sample as text, or only the last one."""
    # Each with its parts, the number of tokens before it, and the key of the answered request.
    turns: list[tuple[list[Completion], int, str]] = []
    parts: list[Completion] = []
    num_context = num_read = len(sample.prompt.token_ids)
    request_key = ""
    for span in sample.spans:
        if isinstance(span, Observation) and span.begins_context:
            num_read = 0
        num_read += len(span.token_ids)
        if isinstance(span, Observation):
            num_context, request_key = num_read, span.request_key
            continue
        parts.append(span)
        if span.finish_reason is not None:
            turns.append((parts, num_context, request_key))
            parts, num_context = [], num_read
    is_over = is_last_turn(sample, rules)
    return tuple(
        rules.dialogue.turn(
            [token_id for part in parts for token_id in part.token_ids],
            [logprob for part in parts for logprob in part.logprobs],
            is_truncated=parts[-1].finish_reason == "length",
            is_last=is_over and place == len(turns) - 1,
            num_context=num_context,
        )._replace(request_key=request_key)
        for place, (parts, num_context, request_key) in enumerate(turns)
        if not last_alone or place == len(turns) - 1
    )


def is_last_turn(sample: Sample, rules: EpisodeRules) -> bool:
    """Return whether the last turn of a sample has to be its last."""
    ends = [span.finish_reason for span in sample.completions if span.finish_reason is not None]
    limits = [span.max_turn_tokens for span in sample.spans if isinstance(span, Observation)]
    # The turn ended because the budget did, not its own limit.
    is_cut = ends[-1:] == ["length"] and not any(limits[-1:])
    is_used_up = sample.num_tokens >= rules.max_response_tokens
    config: EnvironmentConfig = rules.config
    return len(ends) >= config.max_turns or is_cut or is_used_up


def row_of(prompt: Prompt) -> dict[str, object]:
    """Return the part of a prompt that an environment may see."""
    own = {"prompt": prompt.text, "answer": prompt.answer, "dataset": prompt.dataset}
    return {**own, **prompt.columns}


def episode_seed(run_seed: int, prompt_id: int) -> int:
    """Return a seed in [0, 2^31), the same for all samples of a prompt."""
    digest = blake2b(f"{run_seed} {prompt_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 33


def failure(message: str) -> Observation:
    return Observation((), is_final=True, failure=f"the environment has failed: {message}")


def observation_of(
    results: Sequence[StepResult], sample: Sample, rules: EpisodeRules
) -> Observation:
    """Return the observation of the last result; the results before it are repeated and must equal
    what the sample has. Raise TokenizerError for messages that cannot be written as tokens.
    """
    before = [span for span in sample.spans if isinstance(span, Observation)]
    turns = [c for c in sample.completions if c.finish_reason is not None]
    ends = [c.token_ids[-1] for c in turns if c.token_ids]
    first = len(before) + 1 - len(results)  # number of observations before `results`
    for place, (first_time, again) in enumerate(zip(before[first:], results[:-1], strict=True)):
        observation = _observe(rules.dialogue, again, ends[: first + place])
        # Requests with equal tokens are the same request, even with different keys.
        known = first_time._replace(
            token_ids=tuple(first_time.token_ids), request_key=observation.request_key
        )
        if known != observation:
            return failure(
                f"it returned something else when it was built again, after turn {first + place}: "
                "it is not repeatable; with environment.on_restart=again a resumed run begins such "
                "groups again"
            )
    result, is_opening = results[-1], not before
    if result.is_final or is_last_turn(sample, rules):
        return Observation((), is_final=True, reward=result.reward)
    observation = _observe(rules.dialogue, result, ends)
    is_first = is_opening and not sample.prompt.token_ids
    if not observation.token_ids and (is_first or result.begins_context):
        return failure("the first messages of a conversation have no tokens")
    most = rules.config.max_observation_tokens
    if len(observation.token_ids) <= most - (sample.end - sample.num_tokens):
        return observation
    if is_opening:
        return failure(
            f"its first messages have {len(observation.token_ids)} tokens, more than "
            f"environment.max_observation_tokens={most}"
        )
    return Observation((), is_final=True, reward=result.reward)


def _observe(dialogue: Dialogue, result: StepResult, ends: Sequence[int]) -> Observation:
    """Return a result as the policy reads it, after turns that ended with the tokens `ends`."""
    assert not isinstance(result.messages, str)
    if not ends:
        token_ids = dialogue.opening(result.messages, result.tools)
    elif result.begins_context:
        token_ids = dialogue.conversation(result.messages, result.tools)
    else:
        token_ids = dialogue.following(result.messages, is_cut=ends[-1] not in dialogue.stop_ids)
    return Observation(
        token_ids,
        reward=result.reward,
        begins_context=result.begins_context,
        max_turn_tokens=result.max_turn_tokens,
        stop=tuple(result.stop),
        request_key=result.request_key,
    )
