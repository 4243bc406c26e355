"""Samples with arbitrary tokens, one completion of such a sample, a tick, and a packer."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from april_rl.training.algorithm.age import age_weights, decay
from april_rl.training.algorithm.aggregation import token_mean
from april_rl.training.batch.packing import Packer
from april_rl.training.rollout.ticks import Completions, Tick
from april_rl.types import Completion, FinishReason, Prompt, Sample, SampleId

PROMPT = Prompt(id=1, token_ids=(1, 2), text="", answer="", source="")


def completion(index: int, *, start: int, num_tokens: int, version: int) -> Completion:
    """Return an unfinished completion of a sample of prompt 1, sampled by `version`."""
    return Completion(
        sample_id=SampleId(1, index),
        start=start,
        policy_version=version,
        context_version=version,
        token_ids=(7,) * num_tokens,
        logprobs=(-1.0,) * num_tokens,
        finish_reason=None,
    )


def following(
    sample: Sample,
    token_ids: Sequence[int],
    *,
    version: int = 0,
    logprobs: Sequence[float] | None = None,
    finish_reason: FinishReason | None = "stop",
) -> Completion:
    """Return the next completion of `sample`."""
    return Completion(
        sample_id=sample.id,
        start=sample.end,
        policy_version=version,
        context_version=version,
        token_ids=token_ids,
        logprobs=(-0.1,) * len(token_ids) if logprobs is None else logprobs,
        finish_reason=finish_reason,
    )


def whole_sample(
    prompt: Prompt,
    index: int,
    token_ids: Sequence[int],
    *,
    version: int = 0,
    logprobs: Sequence[float] | None = None,
    finish_reason: FinishReason = "stop",
) -> Sample:
    """Return a finished sample whose response is one completion."""
    bare = Sample(prompt=prompt, index=index)
    whole = following(
        bare, token_ids, version=version, logprobs=logprobs, finish_reason=finish_reason
    )
    return bare.with_span(whole)


def make_tick(
    finished: Iterable[Completion] = (),
    *,
    engine_steps: int = 1,
    slot_steps: int = 0,
    elapsed_s: float = 0.0,
) -> Tick:
    """Return a tick that sampled a token in each slot step."""
    return Tick(
        finished=Completions(finished),
        engine_steps=engine_steps,
        slot_steps=slot_steps,
        generated_tokens=slot_steps,
        elapsed_s=elapsed_s,
    )


def make_packer(*, age_decay: float = 1.0, **changes: Any) -> Packer:
    settings = {"num_ranks": 1, "max_tokens": 64, "num_minibatches": 1, "max_staleness": 0}
    settings |= {"max_response_tokens": 64, "aggregation": token_mean, "hidden_size": 64}
    weights = partial(age_weights, weight_of_age=decay(age_decay))
    return Packer(**settings | changes, age_weights=weights)
