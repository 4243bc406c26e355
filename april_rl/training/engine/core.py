"""vLLM's engine core in this process: its start, and its steps under way."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec

import torch
from vllm import EngineArgs
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core_client import InprocClient

from april_rl.errors import RunError
from april_rl.training.engine.scheduler import CountingAsyncScheduler, CountingScheduler
from april_rl.training.engine.tensor_parallel import executor_class

# torch's CPU allocator and the drivers raise no exception type of their own.
_ALLOCATORS = re.compile(r"can't allocate memory|out of memory", re.I)
# vLLM raises ValueError with these words when weights or KV cache do not fit the device.
_CHECKS = re.compile(r"\b(available|free|enough)\b.*\bmemory\b|\bmemory utilization\b", re.I)

# vLLM's errors about experts that it cannot report contain these words.
_NO_EXPERTS = re.compile(r"AuxOutput|routed.experts", re.I)

_MORE_MEMORY = (
    "weights and KV cache of the engine do not fit into memory: change engine.kv_cache_gib (on "
    "CPU) or engine.gpu_memory_utilization (on GPU), or lower engine.max_model_len"
)
_TORCHVISION = (
    "vLLM cannot load its code for this model. For Qwen3.5 and multimodal models it imports "
    "torchvision, which is not installed: install the version that belongs to this torch, on a "
    "CPU from PyTorch's index of builds for CPUs (another build breaks transformers)"
)

_MERGED = (
    "lora.sync=adapter: vLLM cannot apply the adapters of this model; set lora.sync=merged, or "
    "choose other layers in lora.target_modules"
)
_OWN_EXPERTS = (
    "learner.router_replay=engine: vLLM cannot report which experts it chose (on a CPU it never "
    "can, on a GPU it depends on model and kernels); set learner.router_replay=learner"
)


def start_core(args: EngineArgs) -> InprocClient:
    """Start a vLLM core in this process; raise RunError when it cannot."""
    args.scheduler_cls = CountingAsyncScheduler if args.async_scheduling else CountingScheduler
    try:
        config = args.create_engine_config()
        _check_experts(config)
        # vLLM turns this off on CPU, where it gains nothing; here the setting counts everywhere.
        config.scheduler_config.async_scheduling = args.async_scheduling
        return InprocClient(config, executor_class(config), log_stats=False)
    except (ValueError, RuntimeError, MemoryError) as error:
        if lacks_memory(error):
            remedy = _MORE_MEMORY
        elif "failed to be inspected" in str(error) and find_spec("torchvision") is None:
            remedy = f"model.path={args.model}: {_TORCHVISION}"
        elif args.enable_lora and "LoRA" in str(error):
            remedy = _MERGED
        elif args.enable_return_routed_experts and _NO_EXPERTS.search(str(error)):
            remedy = _OWN_EXPERTS
        else:
            raise
        raise RunError(f"{remedy}. vLLM's message: {error}") from error


def _check_experts(config: VllmConfig) -> None:
    """Raise RunError for experts with LoRA layers on a CPU: a Triton kernel would fail later."""
    if config.lora_config and config.model_config.is_moe and current_platform.is_cpu():
        raise RunError(
            "lora.sync=adapter: this model has experts, which vLLM's build for CPUs cannot compute "
            "together with LoRA layers; set lora.sync=merged"
        )


def add_adapter(core: InprocClient, adapter: LoRARequest) -> None:
    """Read an adapter from its folder; raise RunError when vLLM lacks its layers."""
    try:
        core.add_lora(adapter)
    except ValueError as error:
        raise RunError(f"{_MERGED}. vLLM's message: {error}") from error


def lacks_memory(error: Exception) -> bool:
    """Return whether vLLM or torch raised `error` for lack of memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    pattern = _CHECKS if isinstance(error, ValueError) else _ALLOCATORS
    return pattern.search(str(error)) is not None


def drain(core: InprocClient) -> Iterator[EngineCoreOutputs]:
    """Wait for the engine steps that are still being computed and yield their outputs.

    With asynchronous scheduling vLLM returns before the last step is computed. Call this before
    weights change, and before requests are aborted, which would lose that step's tokens.
    """
    steps, scheduler = core.engine_core.batch_queue, core.engine_core.scheduler
    while steps:
        sampled, scheduled, computed = steps.pop()
        computed.result()  # raises the error of the forward pass
        yield from scheduler.update_from_output(scheduled, sampled.result()).values()
