"""The differences between an engine on CPU and one on an accelerator, decided once."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.v1.engine.core_client import InprocClient

from april_rl.config.engine import EngineConfig
from april_rl.training.engine.cpu.fixes import (
    fix_rejection_sampling,
    keep_experts_packed,
    keep_plain_weights,
)
from april_rl.training.engine.cpu.norms import PRIORITY, register_norms
from april_rl.training.engine.cpu.sampler import SAMPLING, SEED, install_counter_sampler
from april_rl.training.rollout.requests import Request


class CpuDevice:
    """The CPU: nothing sleeps; vLLM's linear layers, experts, norms and samplers are replaced."""

    keeps_kv_cache = True  # whether the KV cache survives `sleep`

    def __init__(self, config: EngineConfig) -> None:
        self._kv_cache_bytes = int(config.kv_cache_gib * 2**30)

    def engine_args(self) -> dict[str, Any]:
        """Return the memory limit, without the compiler: compiling would take longer than a small
        model runs.

        Siblings share only whole blocks of a prompt, so blocks are as small as vLLM's attention
        allows on CPU.
        """
        keep_plain_weights()
        keep_experts_packed()
        register_norms()
        fix_rejection_sampling()
        return {
            "ir_op_priority": PRIORITY,
            "kv_cache_memory_bytes": self._kv_cache_bytes,
            "block_size": 32,  # tokens
            "enforce_eager": True,
        }

    def attach(self, core: InprocClient, *, temperature: float) -> None:
        core.collective_rpc(install_counter_sampler, kwargs={"temperature": temperature})

    def with_seed(self, params: SamplingParams, request: Request) -> SamplingParams:
        """Pass our seed: vLLM's own would create a generator for each request."""
        params.extra_args = {SEED: request.seed}
        if request.sampling is not None:
            params.extra_args[SAMPLING] = request.sampling
        return params

    def sleep(self, core: InprocClient) -> None:
        """Do nothing: learner and engine do not take turns in using main memory."""

    def wake(self, core: InprocClient, tag: str) -> None:
        """Do nothing, because nothing slept."""


class AcceleratorDevice:
    """A GPU, shared with the learner: weights and KV cache leave its memory during sleep, or stay
    beside the learner.

    It uses vLLM's own seeds: its sampler on accelerators draws noise that depends on seed and
    position.
    """

    def __init__(self, config: EngineConfig, *, sleeps: bool) -> None:
        """Use the share engine.gpu_memory_utilization; without `sleeps` never free it."""
        self._sleeps, self.keeps_kv_cache = sleeps, not sleeps
        self._args = {
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "enforce_eager": not config.cuda_graphs,
            "enable_sleep_mode": sleeps,  # only sleep needs the special allocator
        }

    def engine_args(self) -> dict[str, Any]:
        return self._args

    def attach(self, core: InprocClient, *, temperature: float) -> None:
        """Do nothing: vLLM needs no changes."""

    def with_seed(self, params: SamplingParams, request: Request) -> SamplingParams:
        """Set vLLM's own seed."""
        params.seed = request.seed
        return params

    def sleep(self, core: InprocClient) -> None:
        """Sleep at level 2, which keeps no copy of the weights: the next sync loads new ones."""
        if self._sleeps:
            core.sleep(level=2)

    def wake(self, core: InprocClient, tag: str) -> None:
        """Allocate only the memory of `tag`: weights are loaded before the KV cache needs room."""
        if self._sleeps:
            core.wake_up([tag])


EngineDevice = CpuDevice | AcceleratorDevice


def this_device(config: EngineConfig, *, sleeps: bool) -> EngineDevice:
    """Return the device that the installed vLLM is built for; on CPU nothing sleeps."""
    if current_platform.is_cpu():
        return CpuDevice(config)
    return AcceleratorDevice(config, sleeps=sleeps)
