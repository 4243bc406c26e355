"""TRL's vLLM, one engine step at a time."""

from __future__ import annotations

import math
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch
from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from vllm import LLM, SamplingParams
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from april_rl.errors import RunError
from april_rl.training.rollout.requests import Request
from april_rl.training.rollout.ticks import Completions, Tick
from april_rl.types import Completion, FinishReason


@dataclass(slots=True)
class _Running:
    request: Request
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("d"))

    def take(self, output: CompletionOutput) -> None:
        """Append the tokens of an engine step."""
        assert output.logprobs is not None
        for token_id, reported in zip(output.token_ids, output.logprobs, strict=True):
            assert reported is not None
            logprob = reported[token_id].logprob
            if not math.isfinite(logprob):
                raise RunError(
                    f"vLLM gave the log-probability {logprob} to a token that it sampled: the "
                    "policy's weights are no longer finite, or the engine's dtype is too narrow "
                    "for them; continue from an earlier checkpoint with a lower learning_rate"
                )
            self.token_ids.append(token_id)
            self.logprobs.append(logprob)

    def completion(self, policy_version: int, reason: FinishReason | None) -> Completion:
        """Return what was sampled, finished for `reason`; None: unfinished."""
        return Completion(
            sample_id=self.request.sample_id,
            start=self.request.start,
            policy_version=policy_version,
            context_version=policy_version,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=reason,
        )


class TrlEngine:
    """TRL's vLLM as a `SingleEngine`, by its public methods; parked samples are prefilled again."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        """Use the engine that the trainer has started."""
        self._vllm = trainer.vllm_generation
        self.policy_version = 0
        self._queue: deque[Request] = deque()
        self._running: dict[str, _Running] = {}
        # Completions not returned yet, for example when a tick is interrupted.
        self._finished: list[Completion] = []
        self._num_requests = 0

    @property
    def _llm(self) -> LLM:
        llm: LLM = self._vllm.llm
        return llm

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Keep weights and KV cache on the device, also with vllm_enable_sleep_mode."""
        own = self._vllm
        if not own.enable_sleep_mode:
            yield
            return
        if own._llm_weights_sleeping:
            own.sync_weights()
        self._llm.wake_up(tags=["kv_cache"])
        yield
        self._llm.sleep(level=2)
        own._llm_weights_sleeping = True

    def advance(self, submit: Sequence[Request], *, slots: int, max_steps: int) -> Tick:
        """Queue `submit`, compute at most `max_steps` engine steps, return what finished."""
        self._queue.extend(submit)
        started = time.perf_counter()
        engine = self._llm.llm_engine
        num_steps = slot_steps = generated = 0
        for _ in range(max_steps):
            while self._queue and len(self._running) < slots:
                self._add(self._queue.popleft())
            if not self._running:
                break
            num_steps, slot_steps = num_steps + 1, slot_steps + len(self._running)
            for output in cast("list[RequestOutput]", engine.step()):
                running, [said] = self._running[output.request_id], output.outputs
                generated += len(said.token_ids)
                running.take(said)
                if output.finished:
                    del self._running[output.request_id]
                    reason: FinishReason = "stop" if said.finish_reason == "stop" else "length"
                    self._finished.append(running.completion(self.policy_version, reason))
        finished, self._finished = self._finished, []
        return Tick(
            finished=Completions(finished),
            engine_steps=num_steps,
            slot_steps=slot_steps,
            generated_tokens=generated,
            elapsed_s=time.perf_counter() - started,
        )

    def abort(self) -> Completions:
        """Return a completion for every request that was not returned, and empty the engine."""
        self._llm.llm_engine.abort_request(list(self._running))
        unfinished = [*self._running.values(), *map(_Running, self._queue)]
        self._running.clear()
        self._queue.clear()
        finished, self._finished = self._finished, []
        return Completions(
            [*finished, *(each.completion(self.policy_version, None) for each in unfinished)]
        )

    def _add(self, request: Request) -> None:
        request_id = f"april-{self._num_requests}"
        self._num_requests += 1
        self._running[request_id] = _Running(request)
        self._llm.llm_engine.add_request(
            request_id, {"prompt_token_ids": request.token_ids}, self._params(request)
        )

    def _params(self, request: Request) -> SamplingParams:
        """Return TRL's parameters for the rest of a sample."""
        own = self._vllm
        given = {
            "repetition_penalty": own.repetition_penalty,
            "temperature": own.temperature,
            "top_p": own.top_p,
            "top_k": own.top_k,
            "min_p": 0.0 if own.min_p is None else own.min_p,
            "logprobs": own.logprobs,
            # TRL decodes by itself otherwise.
            "detokenize": bool(own.generation_kwargs.get("stop")),
            **own.generation_kwargs,
            "structured_outputs": _structured_outputs(own),
            "max_tokens": request.max_tokens,
            "output_kind": RequestOutputKind.DELTA,
        }
        if "min_tokens" in given:
            given["min_tokens"] = max(0, given["min_tokens"] - request.start)
        return SamplingParams(**given)


def _structured_outputs(own: VLLMGeneration) -> StructuredOutputsParams | None:
    """Return TRL's restriction of the tokens."""
    if own.structured_outputs_regex is not None:
        return StructuredOutputsParams(regex=own.structured_outputs_regex)
    given = own.generation_kwargs.get("structured_outputs")
    return StructuredOutputsParams(**given) if isinstance(given, dict) else given


def keep_cpu_weights() -> None:
    """Keep the weights of vLLM's engines on CPUs, which it packs, for the weight sync of TRL."""
    if current_platform.is_cpu():
        from april_rl.training.engine.cpu.fixes import keep_plain_weights

        keep_plain_weights()


def has_packed_weights(llm: LLM) -> bool:
    """Return whether an engine on CPUs has packed weights away, so that none can be loaded."""
    return current_platform.is_cpu() and any(llm.apply_model(_has_empty_weights))


def _has_empty_weights(model: torch.nn.Module) -> bool:
    return any(not parameter.numel() for parameter in model.parameters())
