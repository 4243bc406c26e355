"""samples/step_00010.jsonl and samples/eval_NAME_step_10.jsonl: all samples, to read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from april_rl.types import Completion, FinishReason, Parts, Sample, ScoredGroup

_CONTEXT_TOKENS = 16  # more tokens than a character or a word's space can have


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRecord:
    """One trained sample as it is written and shown."""

    prompt_id: int
    index: int
    prompt: str
    response: str
    answer: str
    reward: float
    advantage: float | None  # mean over its tokens; None where a critic estimates it
    finish_reason: FinishReason
    num_tokens: int  # tokens of the response
    ages: tuple[tuple[int, int], ...]  # (age, tokens) of each completion, oldest first
    source: str
    reward_parts: Parts = ()  # values of several reward functions
    ends: tuple[int, ...] = ()  # characters of the response at the end of each of `ages`
    # With an environment: ("policy" or "environment", text) of each turn and of each reply to it.
    conversation: tuple[tuple[str, str], ...] = ()


def records_of(
    groups: Iterable[ScoredGroup],
    advantages: Sequence[Sequence[float | NDArray[np.float64]]] | None,
    *,
    decode: Callable[[Sequence[int]], str],
    policy_version: int,
) -> list[SampleRecord]:
    """Return the records of all samples of a step that trained `policy_version`; for `advantages`
    by token, the mean is recorded. None: a critic estimates them, and they stay in the workers.
    """
    records = []
    for number, scored in enumerate(groups):
        parts = scored.parts or ((),) * len(scored.rewards)
        rows = zip(scored.group.samples, scored.rewards, parts, strict=True)
        for index, (sample, reward, reward_parts) in enumerate(rows):
            assert sample.finish_reason is not None, sample.id
            response = decode(sample.token_ids)
            records.append(
                SampleRecord(
                    prompt_id=sample.prompt.id,
                    index=sample.index,
                    prompt=sample.prompt.text,
                    response=response,
                    answer=sample.prompt.answer,
                    reward=reward,
                    advantage=None
                    if advantages is None
                    else float(np.mean(advantages[number][index])),
                    finish_reason=sample.finish_reason,
                    num_tokens=sample.num_tokens,
                    ages=tuple(
                        (policy_version - completion.policy_version, len(completion.token_ids))
                        for completion in sample.completions
                        if completion.token_ids
                    ),
                    source=sample.prompt.source,
                    reward_parts=reward_parts,
                    ends=_ends(sample, response, decode),
                    conversation=conversation_of(sample, decode),
                )
            )
    return records


def conversation_of(
    sample: Sample, decode: Callable[[Sequence[int]], str]
) -> tuple[tuple[str, str], ...]:
    """Return who said what, in order; nothing for a sample without an environment."""
    if not sample.prompt.has_environment:
        return ()
    by_speaker = groupby(sample.spans, key=lambda span: isinstance(span, Completion))
    said = (
        ("policy" if is_sampled else "environment", [t for span in spans for t in span.token_ids])
        for is_sampled, spans in by_speaker
    )
    return tuple((who, decode(token_ids)) for who, token_ids in said if token_ids)


def _ends(sample: Sample, response: str, decode: Callable[[Sequence[int]], str]) -> tuple[int, ...]:
    """Return the characters of the response at the end of each completion; none for a response with
    one completion.

    Each piece is decoded once together with some tokens before it. Otherwise a character that
    two pieces share, or the space before a word, would count differently than in the whole
    response.
    """
    token_ids = sample.token_ids
    lengths = accumulate(len(each.token_ids) for each in sample.completions if each.token_ids)
    ends, begin = [0], 0
    for end in lengths:
        before = max(0, begin - _CONTEXT_TOKENS)
        known, longer = decode(token_ids[before:begin]), decode(token_ids[before:end])
        ends.append(ends[-1] + len(longer) - len(known))
        begin = end
    return (*ends[1:-1], len(response)) if len(ends) > 2 else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """One response to a held-out prompt as it is written."""

    prompt_id: int  # position in the set, from 0
    index: int  # index among the k samples of the prompt
    prompt: str
    response: str
    answer: str
    # The answer that the response states; None: there is none, or no function reads it.
    stated: str | None
    reward: float | None  # None: the reward failed
    finish_reason: FinishReason
    num_tokens: int  # tokens of the response
    source: str


def write_samples(folder: Path, step: int, records: Iterable[SampleRecord]) -> Path:
    """Write one JSON object a sample into `folder`, and return the path. Raises OSError."""
    plain = ({**asdict(each), "reward_parts": dict(each.reward_parts)} for each in records)
    return _write(folder / f"step_{step:05d}.jsonl", plain)


def write_evaluation(path: Path, records: Iterable[EvaluationRecord]) -> Path:
    return _write(path, map(asdict, records))


def write_timeline(folder: Path, step: int, timeline: Mapping[str, object]) -> Path:
    """Write the timeline of a step as one JSON object into `folder`; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:05d}.json"
    text = json.dumps({"step": step, **timeline}, separators=(",", ":"))
    path.write_text(text + "\n", encoding="utf-8")
    return path


def _write(path: Path, records: Iterable[Mapping[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    return path
