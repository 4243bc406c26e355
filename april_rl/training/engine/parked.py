"""Requests that vLLM holds with their KV cache but does not compute, between two policy versions.

vLLM computes the requests in its scheduler's list of running ones. A request that is taken off
that list keeps its blocks and its row in the model runner. When it is put back, it continues
with its next token.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import replace
from typing import cast

from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.request import RequestStatus

from april_rl.training.engine.attempt import Attempt
from april_rl.training.rollout.requests import Request
from april_rl.types import SampleId


class Parked:
    """Idle requests of one vLLM core; they are given up when their memory is needed."""

    def __init__(self, core: InprocClient, *, max_num_seqs: int) -> None:
        """Let idle requests leave enough memory for the others.

        That is a block of each kind of cache for each of `max_num_seqs` sequences (or the headroom
        for waiting ones, if larger), and the blocks of one longest sequence. With less, running
        requests might halt, and waiting ones could not start.
        """
        self._core = core
        manager, cache = self._scheduler.kv_cache_manager, self._scheduler.kv_cache_config
        longest = cache.num_blocks / get_max_concurrency_for_kv_cache_config(
            core.engine_core.vllm_config, cache
        )
        next_blocks = max_num_seqs * len(cache.kv_cache_groups)
        self._reserved_blocks = max(next_blocks, manager.watermark_blocks) + math.ceil(longest)
        # vLLM's Model Runner V2 (on GPUs) has `max_num_seqs` rows; a request keeps its row until it
        # ends, computed or not. V1 has rows only for the requests that it computes.
        is_v2 = core.engine_core.vllm_config.use_v2_model_runner
        self._max_requests = max_num_seqs if is_v2 else None
        self._idle: dict[SampleId, tuple[str, Attempt]] = {}

    @property
    def _scheduler(self) -> Scheduler:
        return cast("Scheduler", self._core.engine_core.scheduler)

    def park(self, running: dict[str, Attempt]) -> None:
        """Take running requests with tokens off vLLM's list, and abort the others."""
        kept: set[str] = set()
        for request_id, attempt in running.items():
            held = self._scheduler.requests.get(request_id)
            is_running = held is not None and held.status == RequestStatus.RUNNING
            is_prefilled = attempt.token_ids or attempt.is_continued
            if is_running and is_prefilled:
                self._idle[attempt.request.sample_id] = (request_id, attempt.continuation())
                kept.add(request_id)
        self._scheduler.running = [r for r in self._scheduler.running if r.request_id not in kept]
        self._core.abort_requests([request_id for request_id in running if request_id not in kept])

    def resume(self, request: Request) -> tuple[str, Attempt] | None:
        """Return vLLM's id and the attempt that continues; None if no state fits exactly."""
        found = self._idle.pop(request.sample_id, None)
        if found is None:
            return None
        request_id, attempt = found
        held = self._scheduler.requests.get(request_id)
        if held is None or attempt.request.start != request.start:
            self._core.abort_requests([request_id])
            return None
        self._scheduler.running.append(held)
        return request_id, replace(attempt, request=request)

    def release(self, *, but: Container[SampleId] = ()) -> None:
        """Give up the state of every idle request except those in `but`."""
        gone = [sample_id for sample_id in self._idle if sample_id not in but]
        self._core.abort_requests([self._idle.pop(sample_id)[0] for sample_id in gone])

    def make_room(self) -> None:
        """Give up idle requests, youngest first, while others need their memory or rows."""
        while self._idle and (self._lacks_blocks() or self._lacks_rows()):
            request_id, _ = self._idle.pop(max(self._idle))
            self._core.abort_requests([request_id])

    def _lacks_blocks(self) -> bool:
        pool = self._scheduler.kv_cache_manager.block_pool
        return pool.get_num_free_blocks() < self._reserved_blocks

    def _lacks_rows(self) -> bool:
        limit = self._max_requests
        return limit is not None and len(self._scheduler.requests) > limit
