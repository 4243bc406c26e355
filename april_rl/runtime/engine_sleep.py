"""Whether engines on GPUs sleep while the learner updates: engine.sleep, held against the memory
plan.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from april_rl.config.choices import Sleep
from april_rl.runtime.memory.check import Room, remedies
from april_rl.runtime.memory.inputs import MemoryInputs
from april_rl.runtime.memory.plan import GIB, Phase, plan_memory
from april_rl.runtime.preflight import ModelFacts, PreflightError

# Of a GPU, what engine.sleep=auto leaves free beside engine and learner: activations are estimated,
# and an engine that sleeps for nothing costs seconds, one that does not sleep in time the run.
_MARGIN_FRAC = 0.1


class EngineSleep(NamedTuple):
    """What engine.sleep comes to in a run."""

    inputs: MemoryInputs  # with engine.sleep as it is decided
    reason: str  # for the person who watches; empty where there was nothing to decide


def settle_sleep(facts: ModelFacts, inputs: MemoryInputs, *, room: Room) -> EngineSleep:
    """Decide engine.sleep=auto: engines stay awake where every phase in which the learner works
    fits beside them, with a margin.

    `room` is that of the fullest GPU. Raises PreflightError when they have to sleep and
    rollout.resume=keep needs them awake.
    """
    if inputs.is_on_cpu or inputs.engine.sleep is not Sleep.auto:
        return EngineSleep(inputs, "")
    awake = replace(inputs, engine=replace(inputs.engine, sleep=Sleep.never))
    plan = plan_memory(facts, awake, device_bytes=room.device)
    fullest = max(plan.phases[1:], key=lambda phase: phase.total)  # all but the rollout
    usable = room.free - _MARGIN_FRAC * room.device
    if fullest.total <= usable:
        return EngineSleep(
            awake,
            "engine.sleep=auto: engines stay awake during updates; beside them, "
            f"{fullest.name} takes a GPU to {fullest.total / GIB:.1f} of {room.free / GIB:.1f} GiB",
        )
    too_much = _too_much(fullest, room, usable=usable)
    if inputs.keeps_parked:
        within = Room(device=room.device, free=usable)
        advice = list(remedies(facts, awake, phase=fullest, room=within))
        if fullest.total <= room.free:
            advice.append("engine.sleep=never does without the margin")
        raise PreflightError(
            f"rollout.resume=keep needs engines that stay awake during updates: {too_much}: "
            f"{fullest}; {', '.join([*advice, 'rollout.resume=reprefill lets engines sleep'])}"
        )
    return EngineSleep(
        replace(inputs, engine=replace(inputs.engine, sleep=Sleep.always)),
        f"engine.sleep=auto: engines sleep during updates; were they awake, {too_much}",
    )


def _too_much(phase: Phase, room: Room, *, usable: float) -> str:
    """What is missing in a phase that does not fit beside an engine that is awake."""
    missing, margin = phase.total - usable, room.free - usable
    return (
        f"{phase.name} would take a GPU to {phase.total / GIB:.1f} GiB, {missing / GIB:.1f} more "
        f"than the {room.free / GIB:.1f} that are free, less a margin of {margin / GIB:.1f}"
    )
