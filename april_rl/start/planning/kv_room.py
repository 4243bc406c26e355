"""Warns when the samples in flight may not fit an engine's KV cache: slots times expected length.

When they do not, vLLM does not fail: it preempts the youngest sample and computes it again later,
so the run is slower and rollout/occupancy counts slots that wait. All sizes are tokens of one
engine unless a name says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from april_rl.config import TrainConfig
from april_rl.start.planning.memory_inputs import MemoryInputs
from april_rl.start.planning.memory_plan import GIB
from april_rl.start.planning.sizes import num_slots
from april_rl.training.learner.model.sizes import ModelSizes
from april_rl.training.runtime.layout import Layout

# Lengths are unknown before the first step. With the simulator's lognormal lengths for long
# reasoning (docs/experiments.md: mean 10,500 tokens, budget 16,384 or 20,480) a slot holds 0.35 of
# the budget on average, and 0.5 to 0.65 at the peak of a step.
_EXPECTED_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class KvDemand:
    """Tokens that the samples in flight in one engine are expected to hold."""

    num_slots: int  # samples in flight in one engine
    prompt_tokens: float  # per sample; a prompt that a group shares counts once
    max_response_tokens: int
    larger_cache: str  # advice: how to get a larger cache

    @property
    def expected_tokens(self) -> float:
        """Return the tokens of a slot at the peak of a step: prompt and half a longest response."""
        return self.prompt_tokens + _EXPECTED_SHARE * self.max_response_tokens

    @property
    def total_tokens(self) -> int:
        return math.ceil(self.num_slots * self.expected_tokens)


def kv_demand(config: TrainConfig, layout: Layout) -> KvDemand:
    """Return what the samples of an engine need at the peak of a step."""
    rollout = config.rollout
    shared_by = rollout.group_size if config.engine.prefix_caching else 1
    is_cpu = layout.device == "cpu"
    return KvDemand(
        num_slots=math.ceil(num_slots(config) / layout.num_engines),
        prompt_tokens=config.data.max_prompt_tokens / shared_by,
        max_response_tokens=rollout.max_response_tokens,
        larger_cache="raise engine.kv_cache_gib"
        if is_cpu
        else "raise engine.gpu_memory_utilization or engine.tensor_parallel_size",
    )


def kv_warning(demand: KvDemand, kv_cache_tokens: int) -> Iterator[str]:
    """Yield a warning when the samples of an engine are expected not to fit its KV cache."""
    if demand.total_tokens <= kv_cache_tokens:
        return
    fitting = int(kv_cache_tokens / demand.expected_tokens)
    yield (
        f"warning: KV cache: the {demand.num_slots} samples in flight on an engine may need "
        f"{demand.total_tokens:,} tokens at the peak of a step; its cache holds "
        f"{kv_cache_tokens:,}, enough for {fitting} samples. vLLM would preempt the others and "
        "compute them again. Response lengths are unknown yet: half of "
        f"rollout.max_response_tokens={demand.max_response_tokens} is assumed. If responses are "
        f"that long, {demand.larger_cache}, or lower rollout.over_sampling_factor, "
        "trainer.num_groups or rollout.max_response_tokens"
    )


def planned_kv_tokens(
    model: ModelSizes, inputs: MemoryInputs, *, device_bytes: float, workspace: float = 0.0
) -> int:
    """Return the tokens that an engine's KV cache may hold at most: what its share of
    `device_bytes`, or engine.kv_cache_gib on CPU, leaves beside weights and `workspace` bytes on
    each worker.
    """
    per_token = model.kv_numbers * inputs.kv_bytes
    if inputs.is_on_cpu:
        return int(inputs.engine.kv_cache_gib * GIB / per_token)
    share = inputs.gpu_share * device_bytes - workspace
    weights = inputs.engine_bytes * model.num_parameters
    free = inputs.layout.tensor_parallel_size * share - weights
    return max(0, int(free / per_token))
