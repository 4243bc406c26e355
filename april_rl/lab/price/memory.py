"""The memory of a run on GPUs that are not there, and the settings that it decides."""

from __future__ import annotations

from dataclasses import dataclass, replace

from april_rl.config import TrainConfig
from april_rl.config.choices import Device, Sleep
from april_rl.errors import PreflightError
from april_rl.lab.simulator.calibration import Calibration
from april_rl.run.supervision.host_memory import host_memory
from april_rl.start.planning.engine_sleep import decide_sleep_and_resume
from april_rl.start.planning.facts import Models
from april_rl.start.planning.kv_room import kv_demand, kv_warning, planned_kv_tokens
from april_rl.start.planning.layout import settle
from april_rl.start.planning.memory_check import Room, check_plan
from april_rl.start.planning.memory_inputs import MemoryInputs, memory_inputs
from april_rl.start.planning.memory_plan import GIB, plan_memory
from april_rl.training.runtime.layout import Layout

_FREE_FRAC = 0.98  # free share of a GPU when nothing else runs on it


@dataclass(frozen=True, slots=True, kw_only=True)
class RealMemory:
    """The memory plan of a worker, what it decides, and what does not fit."""

    config: TrainConfig  # without any auto that the plan decides
    layout: Layout
    inputs: MemoryInputs
    kv_tokens: int  # that the KV cache of an engine holds
    table: str
    reasons: tuple[str, ...]  # for each auto
    too_large: str  # empty if every phase fits
    kv_warnings: tuple[str, ...]


def real_layout(config: TrainConfig) -> tuple[TrainConfig, Layout]:
    """Return the recipe's layout on the machine it names; num_workers=auto counts as one engine."""
    workers = config.runtime.num_workers
    gpus = config.engine.tensor_parallel_size if isinstance(workers, str) else workers
    is_on_gpu = config.runtime.device is Device.gpu
    return settle(config, gpus=gpus if is_on_gpu else 0, where="the recipe's machine")


def real_memory(
    config: TrainConfig, models: Models, *, gpu_gib: float, measured: Calibration | None = None
) -> RealMemory:
    """Plan the memory of a worker on the machine that the recipe names, with GPUs of `gpu_gib`."""
    config, layout = real_layout(config)
    inputs = memory_inputs(config, layout, models.beside)
    if measured is not None:
        inputs = replace(inputs, graph_bytes=measured.asleep_gib * GIB)
    room = Room(device=gpu_gib * GIB, free=_FREE_FRAC * gpu_gib * GIB)
    if layout.device == "cpu":
        room = Room(device=0, free=host_memory().free / layout.num_workers)
    # The table of a refused rollout.resume=keep is that of engines that stay awake, as it needs.
    awake = replace(inputs, engine=replace(inputs.engine, sleep=Sleep.never))
    decided, too_large = decide_sleep_and_resume(config, awake, model=models.policy, room=room), ""
    try:
        decided = decide_sleep_and_resume(config, inputs, model=models.policy, room=room)
        check_plan(models.policy, decided.inputs, room)
    except PreflightError as error:
        too_large = str(error)
    cache = planned_kv_tokens(models.policy, decided.inputs, device_bytes=room.device)
    warnings = kv_warning(kv_demand(config, layout), cache)
    return RealMemory(
        config=decided.config,
        layout=layout,
        inputs=decided.inputs,
        kv_tokens=cache,
        table=str(plan_memory(models.policy, decided.inputs, device_bytes=room.device)),
        reasons=decided.reasons,
        too_large=too_large,
        kv_warnings=tuple(line.removeprefix("warning: ") for line in warnings),
    )
