"""Turns what an environment returned into an observation."""

from __future__ import annotations

from collections.abc import Sequence

from april_rl.config.environment import EnvironmentConfig
from april_rl.data.tokenizer import TokenizerError
from april_rl.environments.dialogue import Dialogue
from april_rl.environments.protocol import StepResult
from april_rl.environments.turns import EpisodeRules, is_last_turn
from april_rl.types import Observation, Sample


def observation_of(
    results: Sequence[StepResult],
    sample: Sample,
    rules: EpisodeRules,
    *,
    config: EnvironmentConfig,
) -> Observation:
    """Return the last result as an observation; the others were made a second time, and must be
    what the sample has.
    """
    try:
        return _observation(results, sample, rules, config)
    except TokenizerError as error:
        return failed(str(error))


def failed(message: str) -> Observation:
    """Return the end of an episode whose environment has failed."""
    return Observation((), is_final=True, failure=f"the environment has failed: {message}")


def _observation(
    results: Sequence[StepResult], sample: Sample, rules: EpisodeRules, config: EnvironmentConfig
) -> Observation:
    heard = [span for span in sample.spans if isinstance(span, Observation)]
    turns = [c for c in sample.completions if c.finish_reason is not None]
    ends = [c.token_ids[-1] for c in turns if c.token_ids]
    first = len(heard) + 1 - len(results)  # observations before those of `results`
    for place, (before, again) in enumerate(zip(heard[first:], results[:-1], strict=True)):
        said = _observed(rules.dialogue, again, ends[: first + place])
        # Requests with the same tokens are the same, whatever their keys.
        known = before._replace(token_ids=tuple(before.token_ids), request_key=said.request_key)
        if known != said:
            return failed(
                f"it said something else when it was built again, after turn {first + place}: it "
                "is not repeatable; with environment.on_restart=again a resumed run begins such "
                "groups anew"
            )
    result, is_opening = results[-1], not heard
    if result.is_final or is_last_turn(sample, rules, config.max_turns):
        return Observation((), is_final=True, reward=result.reward)
    said = _observed(rules.dialogue, result, ends)
    is_first = is_opening and not sample.prompt.token_ids
    if not said.token_ids and (is_first or result.begins_context):
        return failed("the first messages of a conversation have no tokens")
    if len(said.token_ids) <= config.max_observation_tokens - (sample.end - sample.num_tokens):
        return said
    if is_opening:
        return failed(
            f"its first words have {len(said.token_ids)} tokens, more than "
            f"environment.max_observation_tokens={config.max_observation_tokens}"
        )
    return Observation((), is_final=True, reward=result.reward)


def _observed(dialogue: Dialogue, result: StepResult, ends: Sequence[int]) -> Observation:
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
