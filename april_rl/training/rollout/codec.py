"""Samples and groups as plain data and back; tokens are arrays, which `checkpointing` writes."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from april_rl.errors import RunError
from april_rl.training.rollout.open_group import OpenGroup
from april_rl.types import (
    Completion,
    Experts,
    Group,
    Observation,
    Prompt,
    Sample,
    SampleId,
    Score,
    ScoredGroup,
    Span,
)

FORMAT = 8  # format of the state that Collector.save returns

Plain = dict[str, Any]  # string keys


def check_state(
    state: Plain, *, num_groups: int, group_size: int, max_staleness: int, max_response_tokens: int
) -> None:
    """Raise RunError unless a run with these settings can resume from the result of
    `Collector.save`: the format and the group size are the same, `num_groups` and `max_staleness`
    are at least as large as when it was saved, and every sample that needs more tokens still has
    some of its budget.
    """
    if state.get("format") != FORMAT:
        raise RunError(
            f"the saved rollout state has format {state.get('format')!r}, and this version of "
            f"april_rl reads format {FORMAT}: resume with the version that saved it"
        )
    for key, value, saved in (
        ("trainer.num_groups", num_groups, state["num_groups"]),
        ("rollout.max_staleness", max_staleness, state["max_staleness"]),
    ):
        if value < saved:
            raise RunError(
                f"{key}={value}, but the saved run had {saved}: more groups are under way than "
                "later steps could train in time"
            )
    if group_size != (saved := state["group_size"]):
        raise RunError(
            f"rollout.group_size={group_size}, but the saved groups have {saved} samples: resume "
            "with that size"
        )
    longest = _longest_unfinished(state, _num_tokens)
    if longest >= max_response_tokens:
        raise RunError(
            f"rollout.max_response_tokens={max_response_tokens}, but an unfinished sample has "
            f"{longest} tokens already; resume with at least the saved run's value"
        )


def check_observations(state: Plain, *, max_observation_tokens: int) -> None:
    """Raise RunError if an unfinished sample has read more of its environment than may be read."""
    longest = _longest_unfinished(state, _num_observed)
    if longest > max_observation_tokens:
        raise RunError(
            f"environment.max_observation_tokens={max_observation_tokens}, but an unfinished "
            f"sample has read {longest} tokens already; resume with at least the saved run's value"
        )


def _longest_unfinished(state: Plain, num_tokens: Callable[[list[Plain]], int]) -> int:
    """Return the largest number of tokens of a sample that needs more; 0 if none does."""
    longest = 0
    for group in state["buffer"]["open"]:
        prompt = restore_prompt(group["prompt"])
        unfinished = (spans for spans in group["samples"] if _needs_tokens(spans, prompt))
        longest = max(longest, *map(num_tokens, unfinished), 0)
    return longest


def _needs_tokens(spans: list[Plain], prompt: Prompt) -> bool:
    """Return whether a saved sample is neither finished nor acting, as its last span shows."""
    last = restore_sample(spans[-1:], prompt=prompt, index=0)
    return not (last.is_finished or last.is_acting)


def _num_tokens(spans: list[Plain]) -> int:
    return sum(len(span["token_ids"]) for span in spans if "logprobs" in span)


def _num_observed(spans: list[Plain]) -> int:
    return sum(len(span["token_ids"]) for span in spans if "logprobs" not in span)


def save_open_group(group: OpenGroup) -> Plain:
    """Return an open group between two steps: prompt, samples, their engines, scores so far."""
    return {
        **_save_group(group.prompt, group.samples),
        "homes": list(group.engines),
        "scores": [_save_score(score) for score in group.scores if score is not None],
    }


def restore_open_group(
    state: Plain, *, num_engines: int, restarts_episodes: bool = False
) -> OpenGroup:
    """Return a saved group. With `restarts_episodes` it is new unless all its episodes are over."""
    group = restore_group(state)
    if restarts_episodes and group.prompt.has_environment and not group.is_complete:
        return OpenGroup(group.prompt, len(group.samples))
    return OpenGroup.restore(
        group,
        engines=[
            engine if engine is not None and engine < num_engines else None
            for engine in state["homes"]
        ],
        scores=[_restore_score(score, prompt_id=group.prompt.id) for score in state["scores"]],
    )


def save_ready_group(scored: ScoredGroup) -> Plain:
    return {
        **_save_group(scored.group.prompt, scored.group.samples),
        "rewards": list(scored.rewards),
        "parts": [dict(parts) for parts in scored.parts],
    }


def restore_ready_group(state: Plain) -> ScoredGroup:
    return ScoredGroup(
        group=restore_group(state),
        rewards=tuple(state["rewards"]),
        parts=tuple(tuple(parts.items()) for parts in state["parts"]),
    )


def _save_group(prompt: Prompt, samples: Sequence[Sample]) -> Plain:
    return {"prompt": save_prompt(prompt), "samples": [save_sample(sample) for sample in samples]}


def restore_group(state: Plain) -> Group:
    """Return the samples of a saved group, open or ready."""
    prompt = restore_prompt(state["prompt"])
    samples = (
        restore_sample(sample, prompt=prompt, index=index)
        for index, sample in enumerate(state["samples"])
    )
    return Group(prompt=prompt, samples=tuple(samples))


def save_prompt(prompt: Prompt) -> Plain:
    return {**asdict(prompt), "token_ids": array("i", prompt.token_ids)}


def restore_prompt(state: Plain) -> Prompt:
    return Prompt(**{**state, "token_ids": tuple(state["token_ids"])})


def save_sample(sample: Sample) -> list[Plain]:
    """Return a sample's spans in order; its group has prompt and index."""
    return [_save_span(span) for span in sample.spans]


def _save_span(span: Span) -> Plain:
    if isinstance(span, Observation):
        return {**span._asdict(), "token_ids": _array("i", span.token_ids)}
    return {
        "policy_version": span.policy_version,
        "context_version": span.context_version,
        "token_ids": _array("i", span.token_ids),
        "logprobs": _array("d", span.logprobs),
        "finish_reason": span.finish_reason,
        **({} if span.experts is None else {"experts": span.experts._asdict()}),
    }


def restore_sample(state: list[Plain], *, prompt: Prompt, index: int) -> Sample:
    """Return the sample that `save_sample` was given."""
    sample_id, end = SampleId(prompt.id, index), 0
    spans: list[Span] = []
    for span in state:
        if "logprobs" in span:
            experts = {"experts": Experts(**span["experts"])} if "experts" in span else {}
            spans.append(Completion(sample_id=sample_id, start=end, **span | experts))
        else:
            observation = Observation(**span)
            spans.append(observation._replace(stop=tuple(observation.stop)))
        end += len(span["token_ids"])
    return Sample(prompt, index, tuple(spans))


def _array(typecode: str, numbers: Iterable[float]) -> array[Any]:
    """Return the array of a completion, which is never changed, or make one."""
    return numbers if isinstance(numbers, array) else array(typecode, numbers)


def _save_score(score: Score) -> Plain:
    return {
        "index": score.sample_id.index,
        "value": score.value,
        "outcome": score.outcome,
        "message": score.message,
        "parts": dict(score.parts),
    }


def _restore_score(state: Plain, *, prompt_id: int) -> Score:
    return Score(
        sample_id=SampleId(prompt_id, state["index"]),
        value=state["value"],
        outcome=state["outcome"],
        message=state["message"],
        parts=tuple(state["parts"].items()),
    )
