"""Decides whether engines on GPUs sleep while the learner updates: engine.sleep=auto, by the memory
plan.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from april_rl.config import TrainConfig
from april_rl.config.choices import Resume, Sleep
from april_rl.learner.model.sizes import ModelSizes
from april_rl.memory.check import Room, remedies
from april_rl.memory.inputs import MemoryInputs, memory_inputs
from april_rl.memory.plan import GIB, Phase, plan_memory
from april_rl.runtime.layout import Layout
from april_rl.runtime.preflight import PreflightError

# Share of a GPU that engine.sleep=auto leaves free beside engine and learner. Activations are
# estimates; an engine that sleeps without need costs seconds, one that should have slept the run.
_MARGIN_FRAC = 0.1


class EngineSleep(NamedTuple):
    """The decision on engine.sleep."""

    inputs: MemoryInputs  # with the decided engine.sleep
    reason: str  # shown to the user; empty when there was nothing to decide


def settle_sleep(model: ModelSizes, inputs: MemoryInputs, *, room: Room) -> EngineSleep:
    """Decide engine.sleep=auto: engines stay awake if every phase of the learner fits beside them,
    with a margin.

    `room` is the memory of the fullest GPU. Raise PreflightError when engines would have to sleep
    but rollout.resume=keep needs them awake.
    """
    if inputs.is_on_cpu or inputs.engine.sleep is not Sleep.auto:
        return EngineSleep(inputs, "")
    awake = replace(inputs, engine=replace(inputs.engine, sleep=Sleep.never))
    plan = plan_memory(model, awake, device_bytes=room.device)
    fullest = max(plan.phases[1:], key=lambda phase: phase.total)  # all but the rollout
    usable = room.free - _MARGIN_FRAC * room.device
    if fullest.total <= usable:
        return EngineSleep(
            awake,
            "engine.sleep=auto: engines stay awake during updates; beside them, "
            f"{fullest.name} needs {fullest.total / GIB:.1f} of a GPU's {room.free / GIB:.1f} GiB",
        )
    too_much = _too_much(fullest, room, usable=usable)
    if inputs.keeps_parked:
        within = Room(device=room.device, free=usable)
        advice = list(remedies(model, awake, phase=fullest, room=within))
        if fullest.total <= room.free:
            advice.append("engine.sleep=never uses the margin too")
        raise PreflightError(
            f"rollout.resume=keep needs engines that stay awake during updates, but {too_much} "
            f"({fullest}). Change one: "
            f"{', '.join([*advice, 'rollout.resume=reprefill lets engines sleep'])}"
        )
    return EngineSleep(
        replace(inputs, engine=replace(inputs.engine, sleep=Sleep.always)),
        f"engine.sleep=auto: engines sleep during updates; if they stayed awake, {too_much}",
    )


def with_resume(
    config: TrainConfig, layout: Layout, *, model: ModelSizes, room: Room
) -> TrainConfig:
    """Return a settled configuration with rollout.resume=auto decided, too: keep where engines stay
    awake.
    """
    if config.rollout.resume is not Resume.auto:
        return config
    inputs = settle_sleep(model, memory_inputs(config, layout), room=room).inputs
    resume = Resume.reprefill if inputs.engine_sleeps else Resume.keep
    return replace(config, rollout=replace(config.rollout, resume=resume))


def _too_much(phase: Phase, room: Room, *, usable: float) -> str:
    """Return by how much a phase does not fit beside an engine that is awake."""
    missing, margin = phase.total - usable, room.free - usable
    return (
        f"{phase.name} would need {phase.total / GIB:.1f} GiB of a GPU, {missing / GIB:.1f} more "
        f"than the {room.free / GIB:.1f} that are free minus a margin of {margin / GIB:.1f}"
    )
