"""Compares the memory plan with the memory of the workers: what does not fit, and which settings
help.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from april_rl.config.choices import Offload, Sleep
from april_rl.errors import PreflightError
from april_rl.run.supervision.host_memory import WorkerMemory
from april_rl.start.planning.memory_inputs import MemoryInputs
from april_rl.start.planning.memory_plan import (
    GIB,
    MemoryPlan,
    Phase,
    engine_weights,
    plan_memory,
)
from april_rl.training.learner.model.sizes import ModelSizes

_TOO_LITTLE = 0.99  # a setting that saves less than 1 % is not worth naming
# Share of a GPU that a plan has to leave free: for CUDA kernels that are loaded late, and memory
# that the allocator holds in pieces too small to use.
_RESERVE_FRAC = 0.02
_LAST_RESORT = "no single setting is enough"


def check_memory(
    model: ModelSizes, inputs: MemoryInputs, workers: Sequence[WorkerMemory]
) -> MemoryPlan:
    """Return the plan of the worker with the least free memory; raise PreflightError."""
    on_node = Counter(worker.node_id for worker in workers)

    def room(worker: WorkerMemory) -> float:
        """Return the worker's part of its node's free memory."""
        return worker.host_free_bytes / on_node[worker.node_id]

    if inputs.is_on_cpu:
        return check_plan(model, inputs, Room(device=0, free=min(map(room, workers))))
    plan = check_plan(model, inputs, least_room(workers))
    # Any node may get rank 0, which writes the export's file: ranks are not assigned yet.
    host_room = min(room(worker) - plan.file_bytes / on_node[worker.node_id] for worker in workers)
    if plan.host.total > host_room:
        raise PreflightError(
            f"host memory: a worker would need {plan.host.total / GIB:.1f} GiB ({plan.host}); its "
            f"part of its node's free memory is {max(0.0, host_room) / GIB:.1f} GiB, after "
            f"{plan.file_bytes / GIB:.1f} GiB for an export's file; "
            + ", ".join(_host_remedies(inputs))
        )
    return plan


def _host_remedies(inputs: MemoryInputs) -> Iterator[str]:
    offload = inputs.learner.offload
    if offload is not Offload.none:
        less = "optimizer or none" if offload is Offload.all else "none"
        yield f"learner.offload={less} needs less"
    if inputs.has_reference and inputs.lora.rank is None:
        yield "algorithm.kl=none needs no reference model"
    if inputs.shard_size < inputs.layout.num_workers:
        yield "learner.shard_size=null needs less"
    else:
        num_workers = 2 * inputs.layout.num_workers
        yield f"runtime.num_workers={num_workers} on twice as many machines needs less"


class Room(NamedTuple):
    """Total and free bytes of a worker's GPU, or of its host on CPU."""

    device: float
    free: float

    @property
    def usable(self) -> float:
        """Return the free bytes that a plan may fill."""
        return self.free - _RESERVE_FRAC * self.device


def least_room(workers: Sequence[WorkerMemory]) -> Room:
    """Return the memory of the GPU that has the least free."""
    least = min(workers, key=lambda worker: worker.free_bytes)
    return Room(device=least.device_bytes, free=least.free_bytes)


def check_plan(model: ModelSizes, inputs: MemoryInputs, room: Room) -> MemoryPlan:
    """Return the plan if it fits into `room`, on a GPU with a reserve, or raise PreflightError."""
    plan = plan_memory(model, inputs, device_bytes=room.device)
    owner, reserve = ("a worker", "") if inputs.is_on_cpu else ("a GPU", ", less a reserve of 2 %")
    within = room._replace(free=room.usable)
    missing = [
        f"{phase.name}: {owner} would need {phase.total / GIB:.1f} GiB and has "
        f"{room.free / GIB:.1f} GiB free{reserve}: {phase}; "
        + (", ".join(remedies(model, inputs, phase=phase, room=within)) or _LAST_RESORT)
        for phase in plan.phases
        if phase.total > room.usable
    ]
    if not inputs.is_on_cpu:
        missing += _too_small_a_share(model, inputs, room)
    if missing:
        lines = "\n".join(f"  - {line}" for line in missing)
        raise PreflightError(f"this run does not fit into memory\n{lines}")
    return plan


def _too_small_a_share(model: ModelSizes, inputs: MemoryInputs, room: Room) -> list[str]:
    """Return a message when the engine's share of the GPU does not exceed its weights."""
    frac = inputs.gpu_share
    share, weights = frac * room.device, engine_weights(model, inputs)
    if weights < share:
        return []
    return [
        f"rollout: engine.gpu_memory_utilization={frac:g} gives the "
        f"engine {share / GIB:.1f} GiB; its weights alone need {weights / GIB:.1f} GiB. Raise it, "
        "or engine.tensor_parallel_size"
    ]


def remedies(model: ModelSizes, inputs: MemoryInputs, *, phase: Phase, room: Room) -> Iterator[str]:
    """Yield settings that make `phase` smaller, each with the size in GiB that it leads to."""
    for key, changed in _changes(model, inputs, phase, room):
        again = plan_memory(model, changed, device_bytes=room.device)
        total = next(other.total for other in again.phases if other.name == phase.name)
        if total < _TOO_LITTLE * phase.total:
            yield f"{key} lowers it to {total / GIB:.1f}"


def _changes(
    model: ModelSizes, inputs: MemoryInputs, phase: Phase, room: Room
) -> Iterator[tuple[str, MemoryInputs]]:
    """Yield a changed setting as text, and the inputs with that change."""
    learner, engine, layout = inputs.learner, inputs.engine, inputs.layout
    if inputs.is_on_cpu:
        fitting = engine.kv_cache_gib - (phase.total - room.free) / GIB
        if (fitting := math.floor(10 * fitting) / 10) > 0:
            changed = replace(engine, kv_cache_gib=fitting)
            yield f"engine.kv_cache_gib={fitting:g}", replace(inputs, engine=changed)
    else:
        away = replace(learner, offload=Offload.all)
        yield "learner.offload=all", replace(inputs, learner=away)
        if not inputs.keeps_parked:
            asleep = replace(engine, sleep=Sleep.always)
            yield "engine.sleep=always", replace(inputs, engine=asleep)
        share = inputs.gpu_share - (phase.total - room.free) / room.device
        share = math.floor(100 * share) / 100
        if share * room.device > engine_weights(model, inputs):
            changed = replace(engine, gpu_memory_utilization=share)
            yield f"engine.gpu_memory_utilization={share:g}", replace(inputs, engine=changed)
    yield (
        "learner.activation_checkpointing=true",
        replace(inputs, learner=replace(learner, activation_checkpointing=True)),
    )
    yield (
        "learner.keep_attention=false",
        replace(inputs, learner=replace(learner, keep_attention=False)),
    )
    fewer = max(inputs.longest_tokens, learner.max_tokens // 2)
    yield (
        f"learner.max_tokens={fewer}",
        replace(inputs, learner=replace(learner, max_tokens=fewer)),
    )
    whole = replace(learner, shard_size=None)
    if inputs.shard_size < layout.num_workers:
        yield "learner.shard_size=null", replace(inputs, learner=whole)
    elif not inputs.is_on_cpu:
        more = replace(layout, num_workers=2 * layout.num_workers)
        yield (
            f"runtime.num_workers={more.num_workers}",
            replace(inputs, layout=more, learner=whole),
        )
