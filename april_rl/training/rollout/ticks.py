"""Results of engines: completions, and counts of what an engine did in one call."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from april_rl.types import Completion, Experts, FinishReason, SampleId

# Finish reasons; a completion is sent with an index into this list.
_REASONS: tuple[FinishReason | None, ...] = (None, *get_args(FinishReason))


class Completions(tuple[Completion, ...]):
    """Completions that are pickled as a few long buffers instead of some twenty objects each."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Callable[..., Completions], tuple[Any, ...]]:
        """Pack the completions for pickle."""
        numbers = [
            (
                *completion.sample_id,
                completion.start,
                len(completion.token_ids),
                completion.policy_version,
                completion.context_version,
                _REASONS.index(completion.finish_reason),
            )
            for completion in self
        ]
        token_ids = _concatenate([completion.token_ids for completion in self], np.intc)
        logprobs = _concatenate([completion.logprobs for completion in self], np.float64)
        experts = [completion.experts for completion in self]
        return _unpack, (np.array(numbers, np.int64), token_ids, logprobs, experts)


def _concatenate(sequences: Iterable[Sequence[float]], kind: type[np.number[Any]]) -> NDArray[Any]:
    """Concatenate into one array; an array is not copied first."""
    return np.concatenate([np.empty(0, kind), *(np.asarray(each, kind) for each in sequences)])


def _unpack(
    numbers: NDArray[np.int64],
    token_ids: NDArray[Any],
    logprobs: NDArray[Any],
    experts: Sequence[Experts | None],
) -> Completions:
    """Return the packed completions with copies of the arrays: the buffers are freed later."""
    completions: list[Completion] = []
    token_bytes, logprob_bytes = (each.view(np.uint8).data for each in (token_ids, logprobs))
    end = 0
    for fields, chosen in zip(numbers.tolist(), experts, strict=True):
        prompt_id, index, start, num_tokens, policy_version, context_version, reason = fields
        begin, end = end, end + num_tokens
        response, behaviour = array("i"), array("d")
        response.frombytes(token_bytes[response.itemsize * begin : response.itemsize * end])
        behaviour.frombytes(logprob_bytes[behaviour.itemsize * begin : behaviour.itemsize * end])
        completions.append(
            Completion(
                sample_id=SampleId(prompt_id, index),
                start=start,
                policy_version=policy_version,
                context_version=context_version,
                token_ids=response,
                logprobs=behaviour,
                finish_reason=_REASONS[reason],
                experts=chosen,
            )
        )
    return Completions(completions)


@dataclass(slots=True)
class TickCounts:
    """Counters of an engine since the beginning of a tick."""

    engine_steps: int = 0
    slot_steps: int = 0  # running requests, summed over engine steps
    context_token_steps: int = 0  # tokens of running requests, summed over engine steps
    generated_tokens: int = 0
    prefilled_tokens: int = 0  # prompt tokens and recomputed tokens
    preempted_samples: int = 0  # times a running request lost its KV cache to another
    preempted_tokens: int = 0  # tokens whose KV cache was lost by that
    kv_cache_frac: float = 0.0  # largest share of the KV cache in use
    failed_attempts: int = 0  # requests that failed, and were tried again or given up


@dataclass(slots=True, kw_only=True)
class Tick(TickCounts):
    """Completions and counts of one engine in one call of `advance`."""

    finished: Completions
    elapsed_s: float


class TickWork(NamedTuple):
    """Work of an engine in one tick, and the seconds it took."""

    engine_steps: int
    slot_steps: int
    context_token_steps: int
    prefilled_tokens: int
    elapsed_s: float

    @classmethod
    def of(cls, tick: Tick) -> TickWork:
        """Return the work of `tick`, without its completions."""
        work = tick.engine_steps, tick.slot_steps, tick.context_token_steps, tick.prefilled_tokens
        return cls(*work, tick.elapsed_s)
