"""vLLM in the worker's process, driven one engine step at a time."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import cast

import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest

from april_rl.config.engine import EngineConfig
from april_rl.config.lora import LoraConfig
from april_rl.training.engine.attempt import Attempt, StopTexts, fits
from april_rl.training.engine.core import add_adapter, drain, start_core
from april_rl.training.engine.device import this_device
from april_rl.training.engine.options import engine_args
from april_rl.training.engine.parked import Parked
from april_rl.training.engine.scheduler import CountingScheduler
from april_rl.training.rollout.requests import Request
from april_rl.training.rollout.ticks import Completions, Tick, TickCounts
from april_rl.types import ENGINE_FAULTS, Completion, SampleId

_MAX_ATTEMPTS = 3  # how often a request is tried when the engine fails it


class VllmEngine:
    """One engine of a worker, on an in-process vLLM core.

    Every submitted request comes back exactly once: finished from `advance`, or unfinished from
    `abort`. Requests wait in this object until a slot is free; vLLM never holds more than the
    slots. A request that vLLM fails (`ENGINE_FAULTS`) is tried again twice. It drives vLLM's engine
    core, below `LLMEngine`, whose text and statistics are not needed.

    With engine.tensor_parallel_size > 1 it is one of that many consecutive ranks of the default
    process group; all make the same calls with the same arguments and get the same results.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model_path: str,
        seed: int,
        temperature: float,
        max_model_len: int,
        max_num_seqs: int,
        keeps_parked: bool,
        sleeps: bool,
        stop_tokens: Sequence[int],
        lora: LoraConfig | None = None,
        reports_experts: bool = False,
    ) -> None:
        """Load the model from the folder `model_path`.

        `max_model_len` (tokens) and `max_num_seqs` replace the settings of the same names, which
        may be 0. Log-probabilities are taken at `temperature`. With `keeps_parked`, aborted samples
        keep their KV cache while memory allows. With `sleeps`, an accelerator frees its memory in
        `sleep`, including the memory of parked samples. `stop_tokens` end a turn. With `lora` an
        adapter of that form is applied once `load_adapter` has read it. With `reports_experts`
        completions have the experts of their tokens. vLLM seeds the whole process with `seed`.
        Raise RunError when it does not fit into memory or cannot report experts.
        """
        self._device = this_device(config, sleeps=sleeps)
        self._core = start_core(
            engine_args(
                config,
                self._device,
                model_path=model_path,
                seed=seed,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                lora=lora,
                reports_experts=reports_experts,
            )
        )
        self._adapter: LoRARequest | None = None
        self._scheduler = cast("CountingScheduler", self._core.engine_core.scheduler)
        self._device.attach(self._core, temperature=temperature)
        self._max_model_len, self._max_num_seqs = max_model_len, max_num_seqs
        self._keeps_parked = keeps_parked and self._device.keeps_kv_cache
        self._parked = Parked(self._core, max_num_seqs=max_num_seqs)
        self._submitted: set[SampleId] = set()  # what was submitted since the last abort
        self._temperature = temperature
        self._stop_token_ids, self._stop_texts = [*stop_tokens], StopTexts(model_path)
        self._queue: deque[Request] = deque()
        self._running: dict[str, Attempt] = {}  # by vLLM's request id, in the order of submission
        self._num_attempts = 0
        self._failures: Counter[SampleId] = Counter()  # consecutive failed attempts
        self.policy_version = 0  # of the weights in use; 0 before the first `load_weights`

    @property
    def keeps_weights(self) -> bool:
        return self._device.keeps_kv_cache

    @property
    def kv_cache_tokens(self) -> int:
        """Return how many tokens fit the KV cache, as vLLM's cache manager counts them."""
        num_tokens = self._core.engine_core.vllm_config.cache_config.kv_cache_size_tokens
        assert num_tokens is not None
        return num_tokens

    def advance(self, submit: Sequence[Request], *, slots: int, max_steps: int) -> Tick:
        """Queue `submit`, compute at most `max_steps` engine steps, and return what finished.

        At most `slots` or `max_num_seqs` requests are computed together, and fewer while the KV
        cache is full; queued ones take free slots in the order of submission. It ends early when no
        request runs or waits. `prefilled_tokens` excludes tokens from the prefix cache and is
        counted when a prefill ends. A request that does not fit the engine ends at once with
        `engine_error`.

        With async_scheduling the last step may still be computed when this returns, so that
        a GPU has work until the next tick; its tokens come with that tick or with `abort`.
        """
        started = time.perf_counter()
        fitting = [each for each in submit if fits(each, max_model_len=self._max_model_len)]
        self._queue.extend(fitting)
        self._submitted.update(request.sample_id for request in fitting)
        counts = self._scheduler.counts = TickCounts()
        finished: list[Completion] = [
            self._attempt(request).completion(self.policy_version, "engine_error")
            for request in submit
            if not fits(request, max_model_len=self._max_model_len)
        ]
        for _ in range(max_steps):
            self._fill(min(slots, self._max_num_seqs))
            if not self._running:
                break
            self._parked.make_room()
            finished += self._take(self._core.get_output(), counts)
        if not self._running:  # a step was scheduled before its requests had ended
            finished += self._drain(counts)
        elapsed_s = time.perf_counter() - started
        return Tick(finished=Completions(finished), elapsed_s=elapsed_s, **asdict(counts))

    def abort(self) -> Completions:
        """Return a completion for every request that `advance` has not returned; the engine is
        empty afterwards.

        First come requests that finish in the step under way; no tick counts the work of that step.
        The others have `finish_reason` None: running ones with the tokens they have, then queued
        ones without tokens, each part in the order of submission. With `keeps_parked`, a request
        that continues such a sample exactly needs no prefill (`Completion.context_version` says
        so).
        """
        finished = list(self._drain(TickCounts()))
        if self._submitted:  # other parked samples continue on another engine, or never
            self._parked.release(but=self._submitted)
        self._submitted.clear()
        self._failures.clear()
        attempts = [*self._running.values(), *map(self._attempt, self._queue)]
        if self._keeps_parked:
            self._parked.park(self._running)
        else:
            self._core.abort_requests(list(self._running))
        self._running.clear()
        self._queue.clear()
        unfinished = (attempt.completion(self.policy_version, None) for attempt in attempts)
        return Completions([*finished, *unfinished])

    def release_parked(self) -> None:
        """Free the KV cache of all aborted samples: they will be prefilled again."""
        self._parked.release()

    def load_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], *, policy_version: int
    ) -> None:
        """Sample with `weights` from now on; only while the engine is empty. The version is
        part of the prefix cache's keys, so that no older entry is used.
        """
        self._assert_empty()
        with torch.no_grad():
            self._core.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.policy_version = policy_version

    def load_adapter(self, folder: Path, *, policy_version: int) -> None:
        """Sample with the adapter in `folder` from now on; only while the engine is empty. Parked
        samples continue with it. Raise RunError when vLLM lacks its layers.
        """
        self._assert_empty()
        name, number = "policy", 1
        add_adapter(self._core, LoRARequest(name, number, str(folder), load_inplace=True))
        self._adapter = LoRARequest(name, number, str(folder))
        self.policy_version = policy_version

    def sleep(self) -> None:
        """Free weights and KV cache if the device sleeps; only while the engine is empty."""
        self._assert_empty()
        if not self._device.keeps_kv_cache:
            self.release_parked()
        self._device.sleep(self._core)

    def wake_weights(self) -> None:
        """Allocate the weights again; their values are undefined until `load_weights`."""
        self._device.wake(self._core, "weights")

    def wake_kv_cache(self) -> None:
        self._device.wake(self._core, "kv_cache")

    def close(self) -> None:
        """Leave the process groups: the process can make another engine."""
        self._core.shutdown()

    def _assert_empty(self) -> None:
        assert not self._running, "abort first: the engine has running requests"
        assert not self._queue, "abort first: the engine has queued requests"
        assert not self._core.engine_core.batch_queue, "abort first: a step is under way"

    def _fill(self, slots: int) -> None:
        while self._queue and len(self._running) < slots:
            request = self._queue.popleft()
            kept = self._parked.resume(request)
            if kept is not None:
                self._running[kept[0]] = kept[1]
                continue
            request_id = str(self._num_attempts)  # for vLLM a resumed sample is a new request
            self._num_attempts += 1
            self._running[request_id] = self._attempt(request)
            self._core.add_request(
                EngineCoreRequest(
                    request_id=request_id,
                    prompt_token_ids=request.token_ids,
                    mm_features=None,
                    sampling_params=self._sampling_params(request),
                    pooling_params=None,
                    arrival_time=time.time(),
                    lora_request=self._adapter,
                    cache_salt=self._cache_salt(request.sample_id),
                    data_parallel_rank=None,
                )
            )

    def _cache_salt(self, sample_id: SampleId) -> str:
        """Return what the keys of the prefix cache depend on in addition to the tokens. A second
        attempt does not use cache entries that may have caused the first failure.
        """
        failures = self._failures[sample_id]
        attempt = f", attempt {1 + failures} of {sample_id}" if failures else ""
        return f"policy {self.policy_version}{attempt}"

    def _attempt(self, request: Request) -> Attempt:
        return Attempt(request, self._stop_texts, context_version=self.policy_version)

    def _sampling_params(self, request: Request) -> SamplingParams:
        own = request.sampling
        params = SamplingParams(
            temperature=self._temperature if own is None else own.temperature,
            top_p=1.0 if own is None else own.top_p,
            max_tokens=request.max_tokens,
            stop_token_ids=self._stop_token_ids,
            logprobs=0,  # only the sampled token's log-probability
            detokenize=False,
            routed_experts_prompt_start=request.num_routed,
        )
        return self._device.with_seed(params, request)

    def _drain(self, counts: TickCounts) -> Iterator[Completion]:
        for outputs in drain(self._core):
            yield from self._take(outputs, counts)

    def _take(self, outputs: EngineCoreOutputs, counts: TickCounts) -> Iterator[Completion]:
        """Process the tokens of an engine step; yield the completions that it finished."""
        for output in outputs.outputs:
            attempt = self._running[output.request_id]
            reason = attempt.take(output)
            counts.generated_tokens += len(output.new_token_ids)
            if output.prefill_stats is not None:
                counts.prefilled_tokens += output.prefill_stats.num_computed_tokens
            counts.prefilled_tokens += self._scheduler.take_recomputed(output.request_id)
            if reason is None:
                continue
            del self._running[output.request_id]
            if output.finish_reason is None:
                self._core.abort_requests([output.request_id])
            if reason in ENGINE_FAULTS:
                counts.failed_attempts += 1
                attempt = self._attempt(attempt.request)  # a new attempt, without the tokens
                if self._try_again(attempt.request):
                    continue
            del self._failures[attempt.request.sample_id]
            yield attempt.completion(self.policy_version, reason)

    def _try_again(self, request: Request) -> bool:
        """Queue a request whose attempt has failed; return False if it has failed too often."""
        self._failures[request.sample_id] += 1
        is_due = self._failures[request.sample_id] < _MAX_ATTEMPTS
        if is_due:
            self._queue.appendleft(request)
        return is_due
