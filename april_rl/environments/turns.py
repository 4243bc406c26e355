"""The input of an environment, made from a sample: its row, its seed, its turns as text."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from april_rl.environments.dialogue import Dialogue
from april_rl.environments.protocol import Turn
from april_rl.types import Completion, Observation, Prompt, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRules:
    """Limits of the episodes of a data set, and the form of their text."""

    dialogue: Dialogue
    max_response_tokens: int


def turns_of(
    sample: Sample, rules: EpisodeRules, max_turns: int, *, last_alone: bool
) -> tuple[Turn, ...]:
    """Return the turns of a sample as text, or the last one alone."""
    # The parts of each turn, what was read before, and the request that it answers.
    turns: list[tuple[list[Completion], int, str]] = []
    said: list[Completion] = []
    num_context = num_read = len(sample.prompt.token_ids)
    request_key = ""
    for span in sample.spans:
        if isinstance(span, Observation) and span.begins_context:
            num_read = 0
        num_read += len(span.token_ids)
        if isinstance(span, Observation):
            num_context, request_key = num_read, span.request_key
            continue
        said.append(span)
        if span.finish_reason is not None:
            turns.append((said, num_context, request_key))
            said, num_context = [], num_read
    is_over = is_last_turn(sample, rules, max_turns)
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


def is_last_turn(sample: Sample, rules: EpisodeRules, max_turns: int) -> bool:
    """Return whether no turn may follow the last one of a sample."""
    ends = [span.finish_reason for span in sample.completions if span.finish_reason is not None]
    limits = [span.max_turn_tokens for span in sample.spans if isinstance(span, Observation)]
    is_cut = ends[-1:] == ["length"] and not any(limits[-1:])  # by no limit of its own
    is_used_up = sample.num_tokens >= rules.max_response_tokens
    return len(ends) >= max_turns or is_cut or is_used_up


def row_of(prompt: Prompt) -> dict[str, object]:
    """Return the part of a prompt that an environment may see."""
    own = {"prompt": prompt.text, "answer": prompt.answer, "dataset": prompt.dataset}
    return {**own, **prompt.columns}


def episode_seed(run_seed: int, prompt_id: int) -> int:
    """Return a seed in [0, 2^31), the same for all samples of a prompt."""
    digest = blake2b(f"{run_seed} {prompt_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 33
