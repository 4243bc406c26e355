"""vLLM's engine core in this process: its start, and the steps it has in flight."""

from __future__ import annotations

from collections.abc import Iterator

from vllm import EngineArgs
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core_client import InprocClient

from april_rl.engine.lockstep import executor_class
from april_rl.engine.memory_errors import lacks_memory
from april_rl.engine.scheduler import counting_scheduler
from april_rl.errors import RunError


class EngineStartError(RunError):
    """The engine could not be built on this device with these settings; the message names them."""


def start_core(args: EngineArgs) -> InprocClient:
    """Start a vLLM core in this process. Raises EngineStartError when memory does not suffice."""
    args.scheduler_cls = counting_scheduler(is_async=bool(args.async_scheduling))
    config = args.create_engine_config()
    # vLLM turns it off on CPU, where it brings nothing; here it does what it is told everywhere.
    config.scheduler_config.async_scheduling = args.async_scheduling
    try:
        return InprocClient(config, executor_class(config), log_stats=False)
    except (ValueError, RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        raise EngineStartError(
            "the engine found no room for weights and KV cache: change engine.kv_cache_gib (on "
            "CPU) or engine.gpu_memory_utilization (on GPU), or lower engine.max_model_len. "
            f"vLLM says: {error}"
        ) from error


def drain(core: InprocClient) -> Iterator[EngineCoreOutputs]:
    """Wait for the engine steps that are still being computed and yield their outputs.

    With asynchronous scheduling vLLM returns before the last step is computed. Nothing may be in
    flight between two ticks, so that an abort loses no token and new weights meet no step of the
    old ones.
    """
    steps, scheduler = core.engine_core.batch_queue, core.engine_core.scheduler
    while steps:
        sampled, scheduled, computed = steps.pop()
        computed.result()  # raises what went wrong in the forward pass
        yield from scheduler.update_from_output(scheduled, sampled.result()).values()
