"""What travels back from engines: completions, and what else an engine did in a call."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from april_rl.types import Completion, FinishReason, SampleId


class Columns(NamedTuple):
    """The numbers of several completions [n each], as their fields are named."""

    prompt_id: NDArray[np.int64]
    index: NDArray[np.int64]  # type: ignore[assignment]  # hides tuple.index, as SampleId does
    start: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    policy_version: NDArray[np.int64]
    context_version: NDArray[np.int64]
    reason: NDArray[np.int64]  # why it ended, as a number; 0 when it is only a part

    @property
    def is_finished(self) -> NDArray[np.bool_]:
        """Whether the response ends there."""
        return self.reason > 0


# Why a completion ended, by its number in the columns.
_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length")


class Completions(tuple[Completion, ...]):
    """Completions that come together, with their numbers in columns.

    The engine's process makes the columns: the controller gets hundreds of thousands a step, and to
    look into each of them is what would cost it most. They travel packed, as a few long buffers,
    where pickle would write and read some twenty objects of each.
    """

    _numbers: bytes  # of each completion in turn: an int64 for each of the columns

    def __new__(cls, completions: Iterable[Completion] = (), numbers: bytes | None = None) -> Self:
        """`numbers`: those of just these completions, where they are known."""
        made = super().__new__(cls, completions)
        made._numbers = _numbers_of(made) if numbers is None else numbers
        return made

    def __reduce__(self) -> tuple[Callable[..., Completions], tuple[Any, ...]]:
        """Packed, for pickle."""
        token_ids = _joined([completion.token_ids for completion in self], np.intc)
        logprobs = _joined([completion.logprobs for completion in self], np.float64)
        return _unpacked, (self._numbers, token_ids, logprobs)

    @classmethod
    def joined(cls, several: Sequence[Completions]) -> Self:
        """All of them, in their order."""
        numbers = b"".join([completions._numbers for completions in several])
        return cls(chain.from_iterable(several), numbers)

    @property
    def columns(self) -> Columns:
        """The numbers of all."""
        return _columns_of(self._numbers)


def _numbers_of(completions: Iterable[Completion]) -> bytes:
    fields = [
        (
            *c.sample_id,
            c.start,
            len(c.token_ids),
            c.policy_version,
            c.context_version,
            _REASONS.index(c.finish_reason),
        )
        for c in completions
    ]
    return np.fromiter(chain.from_iterable(fields), np.int64).tobytes()


def _columns_of(numbers: bytes) -> Columns:
    return Columns(*np.frombuffer(numbers, np.int64).reshape(-1, len(Columns._fields)).T)


def _joined(sequences: Iterable[Sequence[float]], kind: type[np.number[Any]]) -> NDArray[Any]:
    """One behind the other; of an array there is no copy before."""
    return np.concatenate([np.empty(0, kind), *(np.asarray(each, kind) for each in sequences)])


def _unpacked(numbers: bytes, token_ids: NDArray[Any], logprobs: NDArray[Any]) -> Completions:
    """What `Completions.__reduce__` packed. Each completion gets arrays of its own: whatever the
    buffers lie in is free when this returns.
    """
    completions: list[Completion] = []
    token_bytes, logprob_bytes = (each.view(np.uint8).data for each in (token_ids, logprobs))
    end = 0
    for fields in zip(*(column.tolist() for column in _columns_of(numbers)), strict=True):
        prompt_id, index, start, num_tokens, policy_version, context_version, reason = fields
        begin, end = end, end + num_tokens
        response, behaviour = array("i"), array("d")
        response.frombytes(token_bytes[response.itemsize * begin : response.itemsize * end])
        behaviour.frombytes(logprob_bytes[behaviour.itemsize * begin : behaviour.itemsize * end])
        completion = Completion(
            sample_id=SampleId(prompt_id, index),
            start=start,
            policy_version=policy_version,
            context_version=context_version,
            token_ids=response,
            logprobs=behaviour,
            finish_reason=_REASONS[reason],
        )
        completions.append(completion)
    return Completions(completions, numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """What one engine did in one call of `advance`."""

    finished: Completions
    num_running: int  # requests in a slot at the end
    num_queued: int  # requests still waiting for a slot
    engine_steps: int
    slot_steps: int  # Σ over engine steps of requests in a slot
    context_token_steps: int  # Σ over engine steps of tokens held by requests in a slot
    generated_tokens: int
    prefilled_tokens: int  # prompt tokens, and tokens computed again
    elapsed_s: float
    preempted_samples: int = 0  # times a running request lost its KV cache to another
    preempted_tokens: int = 0  # whose keys and values were thrown away by that


@dataclass(slots=True)
class TickCounts:
    """What an engine counts from the beginning of a tick; the fields are those of Tick."""

    engine_steps: int = 0
    slot_steps: int = 0
    context_token_steps: int = 0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    preempted_samples: int = 0
    preempted_tokens: int = 0
