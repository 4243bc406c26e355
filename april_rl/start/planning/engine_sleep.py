"""Decides whether engines on GPUs sleep while the learner updates (engine.sleep=auto, by the memory
plan), and with it whether parked samples keep their KV cache (rollout.resume=auto).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from april_rl.config import TrainConfig
from april_rl.config.choices import Resume, Sleep
from april_rl.errors import PreflightError
from april_rl.start.planning.engine_share import MARGIN_FRAC, settle_share, use_rest
from april_rl.start.planning.kv_room import kv_demand
from april_rl.start.planning.memory_check import Room, remedies
from april_rl.start.planning.memory_inputs import Decision, MemoryInputs
from april_rl.start.planning.memory_plan import GIB, Phase, plan_memory
from april_rl.start.planning.recomputation import settle_recomputation
from april_rl.training.learner.model.sizes import ModelSizes


def settle_sleep(model: ModelSizes, inputs: MemoryInputs, *, room: Room) -> Decision:
    """Decide engine.sleep=auto: engines stay awake if every phase of the learner fits beside them,
    with a margin. `room` is the memory of the fullest GPU. Raise PreflightError when engines would
    have to sleep but rollout.resume=keep needs them awake.
    """
    if inputs.is_on_cpu or inputs.engine.sleep is not Sleep.auto:
        return Decision(inputs, "")
    awake = replace(inputs, engine=replace(inputs.engine, sleep=Sleep.never))
    plan = plan_memory(model, awake, device_bytes=room.device)
    fullest = max(plan.phases[1:], key=lambda phase: phase.total)  # all but the rollout
    usable = room.free - MARGIN_FRAC * room.device
    if fullest.total <= usable:
        return Decision(
            awake,
            "engine.sleep=auto: engines stay awake during updates; beside them, "
            f"{fullest.name} needs {fullest.total / GIB:.1f} of a GPU's {room.free / GIB:.1f} GiB",
        )
    too_much = _too_much(fullest, room, usable=usable)
    if inputs.keeps_parked:
        within = Room(device=room.device, free=usable)
        advice = list(remedies(model, awake, phase=fullest, room=within))
        if fullest.total <= room.usable:
            advice.append("engine.sleep=never uses the margin too")
        raise PreflightError(
            f"rollout.resume=keep needs engines that stay awake during updates, but {too_much} "
            f"({fullest}). Change one: "
            f"{', '.join([*advice, 'rollout.resume=reprefill lets engines sleep'])}"
        )
    return Decision(
        replace(inputs, engine=replace(inputs.engine, sleep=Sleep.always)),
        f"engine.sleep=auto: engines sleep during updates; if they stayed awake, {too_much}",
    )


class Decided(NamedTuple):
    """Settings in which everything that depends on the memory plan is decided."""

    config: TrainConfig
    inputs: MemoryInputs  # inputs of the memory plan, with the decided engine and learner
    reasons: tuple[str, ...]  # shown to the user, one for each auto


def decide_sleep_and_resume(
    config: TrainConfig, inputs: MemoryInputs, *, model: ModelSizes, room: Room
) -> Decided:
    """Decide the engine's share of a GPU, whether it sleeps, which layers of the learner compute
    their activations twice, and rollout.resume: parked samples keep their KV cache where engines
    stay awake. `room` is the memory of the fullest GPU. Raise PreflightError as `settle_sleep`
    does.
    """
    demand = kv_demand(config, inputs.layout)
    asked = inputs.engine.gpu_memory_utilization
    inputs, share = settle_share(model, inputs, room=room, demand=demand)
    inputs, sleep = settle_sleep(model, inputs, room=room)
    inputs, again = settle_recomputation(model, inputs, room=room)
    if isinstance(asked, str) and not share and not inputs.is_on_cpu:
        inputs, share = use_rest(model, inputs, room=room, demand=demand)
    reasons = [reason for reason in (share, sleep, again) if reason]
    if config.rollout.resume is Resume.auto:
        resume, because = _resume(config, engines_sleep=inputs.engine_sleeps)
        config = replace(config, rollout=replace(config.rollout, resume=resume))
        reasons.append(f"rollout.resume: {resume.value}, since {because}")
    config = replace(config, engine=inputs.engine, learner=inputs.learner)
    return Decided(config, inputs, tuple(reasons))


def with_resume(
    config: TrainConfig, inputs: MemoryInputs, *, model: ModelSizes, room: Room
) -> TrainConfig:
    """Return the configuration with rollout.resume=auto decided; no other value is checked."""
    if config.rollout.resume is not Resume.auto:
        return config
    return decide_sleep_and_resume(config, inputs, model=model, room=room).config


def _resume(config: TrainConfig, *, engines_sleep: bool) -> tuple[Resume, str]:
    """Return what rollout.resume=auto becomes, and why."""
    if config.deterministic:
        return Resume.reprefill, "deterministic=true must hold after a kill, which loses KV caches"
    if config.engine.guesses:
        return Resume.reprefill, "with speculation an engine cannot keep parked samples"
    if engines_sleep:
        return Resume.reprefill, "engines sleep during updates and lose their KV caches"
    return Resume.keep, "engines stay awake; parked samples are not prefilled again"


def _too_much(phase: Phase, room: Room, *, usable: float) -> str:
    """Return by how much a phase does not fit beside an engine that is awake."""
    missing, margin = phase.total - usable, room.free - usable
    return (
        f"{phase.name} would need {phase.total / GIB:.1f} GiB of a GPU, {missing / GIB:.1f} more "
        f"than the {room.free / GIB:.1f} that are free minus a margin of {margin / GIB:.1f}"
    )
