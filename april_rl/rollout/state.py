"""The nouns of types.py as plain data and back: dicts, lists, numbers and strings, for JSON.

A float is written so that it reads back to the same bits; token ids stay token ids.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import asdict
from typing import Any

from april_rl.errors import RunError
from april_rl.types import Completion, Prompt, Sample, SampleId, Score

FORMAT = 3  # of what Collector.save returns

Plain = dict[str, Any]  # as json.loads returns it: string keys


class StateError(RunError):
    """A saved state cannot be gone on from, and why."""


def check_state(state: Plain, *, num_groups: int, max_staleness: int) -> None:
    """Raise StateError unless the state was saved in the format that is read here, by a run that
    trained no more groups a step and let them grow no older.
    """
    if state.get("format") != FORMAT:
        raise StateError(
            f"the saved rollout state has format {state.get('format')!r}, and this version of "
            f"april_rl reads format {FORMAT}: resume with the version that saved it"
        )
    for key, value, saved in (
        ("trainer.num_groups", num_groups, state["num_groups"]),
        ("rollout.max_staleness", max_staleness, state["max_staleness"]),
    ):
        if value < saved:
            raise StateError(
                f"{key}={value}, but the saved run had {saved}: more groups are under way than "
                "later steps could train in time"
            )


def save_prompt(prompt: Prompt) -> Plain:
    """All fields of a prompt."""
    return {**asdict(prompt), "token_ids": list(prompt.token_ids)}


def restore_prompt(state: Plain) -> Prompt:
    """What `save_prompt` was given."""
    return Prompt(**{**state, "token_ids": tuple(state["token_ids"])})


def save_sample(sample: Sample) -> list[Plain]:
    """A sample's completions in order; prompt and index are known where it stands."""
    return [
        {
            "policy_version": completion.policy_version,
            "context_version": completion.context_version,
            "token_ids": list(completion.token_ids),
            "logprobs": list(completion.logprobs),
            "finish_reason": completion.finish_reason,
        }
        for completion in sample.completions
    ]


def restore_sample(state: list[Plain], *, prompt: Prompt, index: int) -> Sample:
    """The sample of that prompt and place that `save_sample` was given."""
    sample = Sample(prompt=prompt, index=index)
    for completion in state:
        sample = sample.extended(
            Completion(
                sample_id=sample.id,
                start=sample.num_tokens,
                policy_version=completion["policy_version"],
                context_version=completion["context_version"],
                token_ids=array("i", completion["token_ids"]),  # as engines give them
                logprobs=array("d", completion["logprobs"]),
                finish_reason=completion["finish_reason"],
            )
        )
    return sample


def save_score(score: Score) -> Plain:
    """Place, value (null when there is none) and its parts, outcome and message."""
    return {
        "index": score.sample_id.index,
        "value": score.value if score.is_valid else None,
        "outcome": score.outcome,
        "message": score.message,
        "parts": dict(score.parts),
    }


def restore_score(state: Plain, *, prompt_id: int) -> Score:
    """The score that `save_score` was given."""
    return Score(
        sample_id=SampleId(prompt_id, state["index"]),
        value=math.nan if state["value"] is None else state["value"],
        outcome=state["outcome"],
        message=state["message"],
        parts=tuple(state["parts"].items()),
    )
