"""Tensor-parallel engines: the same vLLM core in every worker of a group, computing the same steps.

vLLM calls this an external launcher. Each rank has its own scheduler. All get the same requests
and depend on nothing else, so they stay in lockstep without communicating.
"""

from __future__ import annotations

import os
import uuid
from typing import Any

import torch.distributed as dist
from vllm.config import VllmConfig
from vllm.v1.executor import Executor
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

_PREFIX = "april_rl"
_NO_SHORTCUTS = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}


def parallel_args(tensor_parallel_size: int) -> dict[str, Any]:
    """Return keyword arguments of `vllm.EngineArgs` for one rank of an engine of
    `tensor_parallel_size`.

    Only NCCL reduces over the ranks. vLLM's faster ways map the memory of peers by device
    number, but each worker sees only its own GPU: if that fails on some ranks only, they wait
    for each other. They are turned off for the whole process.
    """
    if tensor_parallel_size == 1:
        return {"distributed_executor_backend": "uni"}
    os.environ.update(_NO_SHORTCUTS)
    return {
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": tensor_parallel_size,
        "disable_custom_all_reduce": True,
        "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}},
    }


def executor_class(config: VllmConfig) -> type[Executor]:
    """Return the executor for the arguments above; with several ranks, all must call this."""
    if config.parallel_config.tensor_parallel_size == 1:
        found: type[Executor] = Executor.get_class(config)
        return found
    names = [f"{_PREFIX}-{os.getpid()}-{uuid.uuid4().hex[:12]}"]
    dist.broadcast_object_list(names, src=0)

    class Named(_LockstepExecutor):
        name = names[0]

    named: type[Executor] = Named
    return named


class _LockstepExecutor(ExecutorWithExternalLauncher):
    """vLLM's executor with a name that is unique to the engine.

    vLLM names its shared memory after the address where the ranks meet, which is just "env://" for
    its external launcher: two runs on one machine would share it, and a killed run would keep the
    next one from starting.
    """

    name: str

    def _distributed_args(self) -> tuple[str, int, int]:
        """Return (where the ranks meet, rank, device); the ranks are already connected."""
        return f"{_PREFIX}:{self.name}", dist.get_rank(), 0
