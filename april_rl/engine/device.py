"""What differs between an engine on CPU and one on an accelerator, decided once."""

from __future__ import annotations

from typing import Any, Protocol

from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.v1.engine.core_client import InprocClient

from april_rl.config.engine import EngineConfig
from april_rl.engine.cpu import (
    SAMPLING,
    SEED,
    install_counter_sampler,
    keep_experts_packed,
    keep_plain_weights,
)
from april_rl.engine.cpu_norms import PRIORITY, register_norms
from april_rl.engine.cpu_speculation import mend_rejection_sampling
from april_rl.types import Request


class Device(Protocol):
    """The device-dependent part of `VllmEngine`."""

    keeps_kv_cache: bool  # through `sleep`

    def engine_args(self) -> dict[str, Any]:
        """Keyword arguments of `vllm.EngineArgs`; called before vLLM builds anything."""

    def attach(self, core: InprocClient, *, temperature: float) -> None:
        """Finish a core that was just built."""

    def draw(self, params: SamplingParams, request: Request) -> SamplingParams:
        """Return `params` with the request's seed, and whatever else its draws depend on."""

    def sleep(self, core: InprocClient) -> None:
        """Give up what memory the device can give up."""

    def wake(self, core: InprocClient, tag: str) -> None:
        """Take the memory of `tag`, weights or kv_cache, again."""


class CpuDevice:
    """The processor: nothing sleeps; linear layers, experts, norms and samplers are
    replaced.
    """

    keeps_kv_cache = True

    def __init__(self, config: EngineConfig) -> None:
        """Set aside engine.kv_cache_gib of main memory for keys and values."""
        self._kv_cache_bytes = int(config.kv_cache_gib * 2**30)

    def engine_args(self) -> dict[str, Any]:
        """Exactly this much memory, and no compiler: it would run longer than a small model.

        Only whole blocks of a prompt are shared by its siblings, so they are as small as vLLM's
        attention allows on CPU.
        """
        keep_plain_weights()
        keep_experts_packed()
        register_norms()
        mend_rejection_sampling()
        return {
            "ir_op_priority": PRIORITY,
            "kv_cache_memory_bytes": self._kv_cache_bytes,
            "block_size": 32,  # tokens
            "enforce_eager": True,
        }

    def attach(self, core: InprocClient, *, temperature: float) -> None:
        """Replace the sampler."""
        runner = core.engine_core.model_executor.driver_worker.worker.model_runner
        install_counter_sampler(runner, temperature=temperature)

    def draw(self, params: SamplingParams, request: Request) -> SamplingParams:
        """The seed travels beside vLLM's own, which would cost a generator a request."""
        params.extra_args = {SEED: request.seed}
        if request.sampling is not None:
            params.extra_args[SAMPLING] = request.sampling
        return params

    def sleep(self, core: InprocClient) -> None:
        """Main memory is not shared out between learner and engine."""

    def wake(self, core: InprocClient, tag: str) -> None:
        """Nothing slept."""


class AcceleratorDevice:
    """A GPU, shared with the learner: weights and KV cache leave its memory during sleep, or stay
    there beside the learner.

    vLLM's own seeds are used: its accelerator sampler draws noise that is a function of seed and
    position.
    """

    def __init__(self, config: EngineConfig, *, sleeps: bool) -> None:
        """Take the share engine.gpu_memory_utilization of the device for weights and KV cache;
        without `sleeps` the engine never gives it back.
        """
        self._sleeps, self.keeps_kv_cache = sleeps, not sleeps
        self._args = {
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "enforce_eager": not config.cuda_graphs,
            "enable_sleep_mode": sleeps,  # an allocator of its own, which nothing else needs
        }

    def engine_args(self) -> dict[str, Any]:
        """The share of the device, and whether it will be given back."""
        return self._args

    def attach(self, core: InprocClient, *, temperature: float) -> None:
        """vLLM is right as it is."""

    def draw(self, params: SamplingParams, request: Request) -> SamplingParams:
        """vLLM's own seed, temperature and nucleus."""
        params.seed = request.seed
        return params

    def sleep(self, core: InprocClient) -> None:
        """Level 2 keeps no copy of the weights: the next sync brings new ones."""
        if self._sleeps:
            core.sleep(level=2)

    def wake(self, core: InprocClient, tag: str) -> None:
        """Only the memory of `tag`, so that weights can come in before the KV cache needs room."""
        if self._sleeps:
            core.wake_up([tag])


def this_device(config: EngineConfig, *, sleeps: bool) -> Device:
    """Return the device the installed vLLM is built for; on CPU nothing sleeps."""
    if current_platform.is_cpu():
        return CpuDevice(config)
    return AcceleratorDevice(config, sleeps=sleeps)
