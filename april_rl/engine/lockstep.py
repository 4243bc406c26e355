"""Tensor-parallel engines: the same vLLM core in every worker of a group, computing the same steps.

vLLM calls it an external launcher. Each rank has a scheduler of its own; as all of them are given
the same requests and decide by nothing else, they stay in step without asking each other.
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
    """Keyword arguments of `vllm.EngineArgs` for one rank of an engine of that many.

    NCCL alone adds up what the ranks have. vLLM's faster ways map the memory of peers by device
    numbers, and each worker sees its own GPU only: where that fails on one rank and not on another,
    they wait for each other. They are turned off for the whole process.
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
    """What runs the model of an engine with the arguments above; a collective of all ranks when
    there is more than one to an engine.
    """
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
    """vLLM's own, with a name that is no other's.

    vLLM names its shared memory after the address where the ranks meet, and after nothing but
    "env://" for its external launcher: two runs on one machine would meet in it, and one that was
    killed would keep the next from starting.
    """

    name: str

    def _distributed_args(self) -> tuple[str, int, int]:
        """(where the ranks meet, rank, device): they have met already."""
        return f"{_PREFIX}:{self.name}", dist.get_rank(), 0
