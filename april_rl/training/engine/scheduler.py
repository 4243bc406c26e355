"""vLLM's scheduler, with counters.

When the KV cache is full, vLLM preempts the running request that came last: it discards its keys
and values, and computes them again once there is room. vLLM's outputs do not report that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from april_rl.training.rollout.ticks import TickCounts


class CountingScheduler(Scheduler):
    """Counts engine steps, the requests in each of them, their KV cache, and preemptions."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's own
        super().__init__(*args, **kwargs)
        self.counts = TickCounts()  # counts of this tick; the engine replaces it
        if not get_tp_group().is_first_rank:
            self.aux_output_connector = None  # only the first rank's worker reports experts
        self._recomputed: dict[str, int] = {}  # tokens by request, until its next token is sampled

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule and count an engine step."""
        computed = {request.request_id: request.num_computed_tokens for request in self.running}
        output = super().schedule(throttle_prefills)
        for request_id in output.preempted_req_ids or ():
            self.counts.preempted_samples += 1
            self.counts.preempted_tokens += computed[request_id]
        if output.total_num_scheduled_tokens:
            self.counts.engine_steps += 1
            self.counts.slot_steps += len(self.running)
            self.counts.context_token_steps += sum(request.num_tokens for request in self.running)
            used = self.get_kv_cache_usage()
            self.counts.kv_cache_frac = max(self.counts.kv_cache_frac, used)
        for request_id, num_cached in _resumed_requests(output, self.requests):
            self._recomputed[request_id] = self.requests[request_id].num_tokens - num_cached
        return output

    def take_recomputed(self, request_id: str) -> int:
        return self._recomputed.pop(request_id, 0)


def _resumed_requests(
    output: SchedulerOutput, requests: Mapping[str, Request]
) -> Iterator[tuple[str, int]]:
    """Yield preempted requests that run again, with the tokens that the prefix cache kept; vLLM's
    newer model runner lists them as new requests, the older one as known ones.
    """
    for new in output.scheduled_new_reqs:
        if requests[new.req_id].num_preemptions:
            yield new.req_id, new.num_computed_tokens
    known = output.scheduled_cached_reqs
    if known.resumed_req_ids:
        for request_id, num_cached in zip(known.req_ids, known.num_computed_tokens, strict=True):
            if request_id in known.resumed_req_ids:
                yield request_id, num_cached


class CountingAsyncScheduler(CountingScheduler, AsyncScheduler):
    """The same for async_scheduling in engine.args."""
