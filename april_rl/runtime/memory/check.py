"""The memory plan held against what workers have: what fits, and what to set where it does not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from april_rl.config import TrainConfig
from april_rl.config.choices import ComputeDtype, Kl, KvCacheDtype, Resume, Sleep
from april_rl.runtime.layout import Layout
from april_rl.runtime.memory.host import WorkerMemory
from april_rl.runtime.memory.plan import GIB, MemoryPlan, MemorySettings, Phase, plan_memory
from april_rl.runtime.preflight import ModelFacts, PreflightError

_TOO_LITTLE = 0.99  # what saves less than a hundredth helps nobody
_LAST_RESORT = "no setting is enough by itself"


def memory_settings(config: TrainConfig, layout: Layout) -> MemorySettings:
    """What a checked configuration says about memory; with engine.sleep=auto engines sleep, unless
    `settle_sleep` finds that they need not.
    """
    learner, engine = config.learner, config.engine
    return MemorySettings(
        device=layout.device,
        num_workers=layout.num_workers,
        shard_size=learner.shard_size or layout.num_workers,
        offload="none" if layout.device == "cpu" else learner.offload.name,  # as the learner's
        lora_rank=config.lora.rank,
        has_reference=config.algorithm.kl is not Kl.none,
        compute_bytes=_BYTES[learner.compute_dtype],
        activation_checkpointing=learner.activation_checkpointing,
        max_tokens=learner.max_tokens,
        longest_tokens=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
        engine_bytes=_BYTES[engine.dtype],
        tensor_parallel_size=layout.tensor_parallel_size,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        kv_cache_gib=engine.kv_cache_gib,
        kv_bytes=_BYTES[engine.dtype] if engine.kv_cache_dtype is KvCacheDtype.auto else 1,
        cuda_graphs=engine.cuda_graphs,
        engine_sleeps=engine.sleep is not Sleep.never,
        keeps_parked=config.rollout.resume is Resume.keep,
    )


_BYTES = {ComputeDtype.bfloat16: 2, ComputeDtype.float32: 4}


def check_memory(
    facts: ModelFacts, settings: MemorySettings, workers: Sequence[WorkerMemory]
) -> MemoryPlan:
    """The plan of the worker with the least free memory, when it fits.

    Raises PreflightError naming what does not fit, and where, and the settings that help.
    """
    on_node = Counter(worker.node_id for worker in workers)

    def room(worker: WorkerMemory) -> float:
        """Free host memory of one of a node's workers."""
        return worker.host_free_bytes / on_node[worker.node_id]

    if settings.device == "cpu":
        return check_plan(facts, settings, Room(device=0, free=min(map(room, workers))))
    plan = check_plan(facts, settings, least_room(workers))
    # Which node has rank 0, and the file of a checkpoint, is not settled yet: it may be any.
    host_room = min(room(worker) - plan.file_bytes / on_node[worker.node_id] for worker in workers)
    if plan.host.total > host_room:
        raise PreflightError(
            f"host memory: a worker would hold {plan.host.total / GIB:.1f} GiB ({plan.host}) and "
            f"its part of what its node has free is {max(0.0, host_room) / GIB:.1f} GiB, without "
            f"the {plan.file_bytes / GIB:.1f} GiB of a checkpoint's file; "
            + (", ".join(_host_remedies(settings)) or _LAST_RESORT)
        )
    return plan


def _host_remedies(settings: MemorySettings) -> Iterator[str]:
    """What takes less host memory on a GPU."""
    if settings.offload != "none":
        less = "optimizer or none" if settings.offload == "all" else "none"
        yield f"learner.offload={less} takes less"
    if settings.has_reference and not settings.lora_rank:
        yield "algorithm.kl=none has no reference"


class Room(NamedTuple):
    """Bytes of a worker's device, all of them, and those that are free; on CPU of its host."""

    device: float
    free: float


def least_room(workers: Sequence[WorkerMemory]) -> Room:
    """Return what the worker with the least free memory on its GPU has there."""
    least = min(workers, key=lambda worker: worker.free_bytes)
    return Room(device=least.device_bytes, free=least.free_bytes)


def check_plan(facts: ModelFacts, settings: MemorySettings, room: Room) -> MemoryPlan:
    """The plan, when every phase of it fits into `room`.

    Raises PreflightError with the phases that do not, their items, and the settings that help.
    """
    plan = plan_memory(facts, settings, device_bytes=room.device)
    owner = "a worker" if settings.device == "cpu" else "a GPU"
    missing = [
        f"{phase.name}: {owner} would hold {phase.total / GIB:.1f} GiB and has "
        f"{room.free / GIB:.1f} GiB free: {phase}; "
        + (", ".join(remedies(facts, settings, phase=phase, room=room)) or _LAST_RESORT)
        for phase in plan.phases
        if phase.total > room.free
    ]
    if settings.device != "cpu":
        missing += _too_small_a_share(facts, settings, room)
    if missing:
        lines = "\n".join(f"  - {line}" for line in missing)
        raise PreflightError(f"this run does not fit into memory\n{lines}")
    return plan


def _too_small_a_share(facts: ModelFacts, settings: MemorySettings, room: Room) -> list[str]:
    """What to say when the engine has no room for more than its weights."""
    share = settings.gpu_memory_utilization * room.device
    weights = _engine_weights(facts, settings)
    if weights < share:
        return []
    return [
        f"rollout: engine.gpu_memory_utilization={settings.gpu_memory_utilization:g} gives the "
        f"engine {share / GIB:.1f} GiB, its weights alone take {weights / GIB:.1f} GiB: raise it, "
        "or engine.tensor_parallel_size"
    ]


def _engine_weights(facts: ModelFacts, settings: MemorySettings) -> float:
    """Bytes on one of the workers of an engine."""
    return facts.num_parameters * settings.engine_bytes / settings.tensor_parallel_size


def remedies(
    facts: ModelFacts, settings: MemorySettings, *, phase: Phase, room: Room
) -> Iterator[str]:
    """Yield settings that make `phase` smaller, each with what it would be then in GiB."""
    for key, changed in _changes(facts, settings, phase, room):
        again = plan_memory(facts, changed, device_bytes=room.device)
        total = next(other.total for other in again.phases if other.name == phase.name)
        if total < _TOO_LITTLE * phase.total:
            yield f"{key} makes it {total / GIB:.1f}"


def _changes(
    facts: ModelFacts, settings: MemorySettings, phase: Phase, room: Room
) -> Iterator[tuple[str, MemorySettings]]:
    """What could be set otherwise, and the settings as they are then."""
    if settings.device == "cpu":
        half = settings.kv_cache_gib / 2
        yield f"engine.kv_cache_gib={half:g}", replace(settings, kv_cache_gib=half)
    else:
        yield "learner.offload=all", replace(settings, offload="all")
        if not settings.keeps_parked:
            yield "engine.sleep=always", replace(settings, engine_sleeps=True)
        share = settings.gpu_memory_utilization - (phase.total - room.free) / room.device
        share = math.floor(100 * share) / 100
        if share * room.device > _engine_weights(facts, settings):
            key = f"engine.gpu_memory_utilization={share:g}"
            yield key, replace(settings, gpu_memory_utilization=share)
    yield (
        "learner.activation_checkpointing=true",
        replace(settings, activation_checkpointing=True),
    )
    fewer = max(settings.longest_tokens, settings.max_tokens // 2)
    yield f"learner.max_tokens={fewer}", replace(settings, max_tokens=fewer)
    if settings.shard_size < settings.num_workers:
        yield "learner.shard_size=0", replace(settings, shard_size=settings.num_workers)
    elif settings.device != "cpu":
        more = 2 * settings.num_workers
        key, changed = f"runtime.num_workers={more}", replace(settings, num_workers=more)
        yield key, replace(changed, shard_size=more)
