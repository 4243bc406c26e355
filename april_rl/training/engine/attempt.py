"""The tokens that one request has sampled so far."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from numpy.typing import NDArray
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine import FinishReason as EndOfRequest

from april_rl.training.rollout.requests import Request
from april_rl.types import Completion, Experts, FinishReason

_ENDS: dict[EndOfRequest, FinishReason] = {EndOfRequest.STOP: "stop", EndOfRequest.LENGTH: "length"}


class StopTexts:
    """Finds texts that end a turn; the tokenizer is loaded for the first request that has some.

    vLLM itself does this above the engine core, where it decodes.
    """

    def __init__(self, model_path: str) -> None:
        self._model_path = model_path

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(self._model_path)

    def end(self, texts: Sequence[str], token_ids: Sequence[int], *, num_new: int) -> int | None:
        """Return the number of tokens up to the end of the first text that ends within the last
        `num_new` tokens, or None.
        """
        # A token may be only a part of a character.
        num_read = num_new + max(len(text.encode()) for text in texts)
        first = max(0, len(token_ids) - num_read)
        for end in range(len(token_ids) - num_new + 1, len(token_ids) + 1):
            said = self._tokenizer.decode(list(token_ids[first:end]), skip_special_tokens=True)
            if any(text in said for text in texts):
                return end
        return None


@dataclass(slots=True)
class Attempt:
    """A request with the tokens and behaviour log-probabilities (nats) sampled for it."""

    request: Request
    stop_texts: StopTexts
    context_version: int  # policy version that computed the first part of its KV cache
    token_ids: array[int] = field(default_factory=lambda: array("i"))  # [R of this completion]
    logprobs: array[float] = field(default_factory=lambda: array("d"))  # [R of this completion]
    is_continued: bool = False  # it continues with the KV cache of an earlier request
    experts: Experts | None = None  # experts of the tokens that were read, where vLLM reports them

    def take(self, output: EngineCoreOutput) -> FinishReason | None:
        """Append the output of an engine step; return how the request ended, one of ENGINE_FAULTS
        if it failed, or None. Raise RuntimeError when vLLM reports no log-probabilities.
        """
        if output.new_token_ids and not self._append(output):
            return "nan_logprobs"
        if output.routed_experts is not None and self.request.sampling is None:
            self._append_experts(output.routed_experts)
        if self.request.stop and self._is_stopped(num_new=len(output.new_token_ids)):
            return "stop"
        if output.finish_reason is None:
            is_full = len(self.token_ids) >= self.request.max_tokens
            return "length" if is_full else None  # vLLM does not notice that the context is full
        if output.finish_reason not in _ENDS:
            return "engine_error"
        return _ENDS[output.finish_reason] if self.token_ids else "no_tokens"

    def _append(self, output: EngineCoreOutput) -> bool:
        """Append the new tokens, or none and return False if a log-probability is not finite."""
        token_ids = output.new_token_ids
        reported = output.new_logprobs
        if reported is None or reported.logprob_token_ids[:, 0].tolist() != token_ids:
            raise RuntimeError(
                f"sample {self.request.sample_id}: vLLM reported no log-probability for the tokens "
                f"it sampled ({token_ids})"
            )
        logprobs = reported.logprobs[:, 0].tolist()
        if not all(map(math.isfinite, logprobs)):
            return False
        self.token_ids.fromlist(token_ids)
        self.logprobs.fromlist(logprobs)
        return True

    def _append_experts(self, rows: NDArray[Any]) -> None:
        """Append the experts of the tokens that were read, [tokens, layers, experts of a token]."""
        if self.experts is None:
            self.experts = Experts(array(rows.dtype.char), *rows.shape[1:])
        self.experts.numbers.frombytes(rows.tobytes())

    def _known_experts(self) -> Experts | None:
        """Return a copy of the experts of the tokens before the last one, without spare capacity
        and without the experts of tokens that a stop text has cut off.

        Raise RuntimeError when vLLM reported fewer.
        """
        if self.experts is None or not self.token_ids:
            return None
        num_tokens = self.request.num_tokens + len(self.token_ids) - 1 - self.request.num_routed
        if self.experts.num_tokens < num_tokens:
            raise RuntimeError(
                f"sample {self.request.sample_id}: vLLM reported the experts of "
                f"{self.experts.num_tokens} tokens instead of {num_tokens}"
            )
        numbers, num_layers, num_chosen = self.experts
        return self.experts._replace(numbers=numbers[: num_tokens * num_layers * num_chosen])

    def _is_stopped(self, *, num_new: int) -> bool:
        """Return whether a stop text of the request occurs, and remove the tokens after it. A
        text that an abort has cut in two, because it began before the request, is not found.
        """
        end = self.stop_texts.end(self.request.stop, self.token_ids, num_new=num_new)
        if end is None:
            return False
        del self.token_ids[end:], self.logprobs[end:]
        return True

    def continuation(self) -> Attempt:
        """Return the attempt that continues after these tokens with the same KV cache."""
        start = self.request.start + len(self.token_ids)
        return Attempt(
            request=self.request._replace(start=start),
            stop_texts=self.stop_texts,
            context_version=self.context_version,
            is_continued=True,
        )

    def completion(self, policy_version: int, finish_reason: FinishReason | None) -> Completion:
        """Return everything so far, sampled by `policy_version`."""
        return Completion(
            sample_id=self.request.sample_id,
            start=self.request.start,
            policy_version=policy_version,
            context_version=self.context_version,
            token_ids=self.token_ids[:],  # a copy, without spare capacity
            logprobs=self.logprobs[:],
            finish_reason=finish_reason,
            experts=self._known_experts(),
        )


def fits(request: Request, *, max_model_len: int) -> bool:
    """Return whether the request has a token to start from, and room for one more."""
    num_tokens, max_tokens = request.num_tokens, request.max_tokens
    return num_tokens >= 1 and max_tokens >= 1 and num_tokens + max_tokens <= max_model_len
