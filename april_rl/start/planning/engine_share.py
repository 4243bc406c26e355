"""Decides the engine's share of a GPU (engine.gpu_memory_utilization=auto), by the memory plan.

An engine that stays awake during updates holds its share in every phase; an engine that sleeps
holds it only in the rollout, where the learner needs less. So the share decides whether engines can
stay awake. Memory goes where it saves time: first a KV cache for the samples in flight, then the
learner's activations, which would be computed twice otherwise, and the rest to the KV cache again.
"""

from __future__ import annotations

import math
from dataclasses import replace

from april_rl.config.choices import Sleep
from april_rl.config.engine import EngineConfig
from april_rl.start.planning.kv_room import KvDemand, planned_kv_tokens
from april_rl.start.planning.memory_check import Room
from april_rl.start.planning.memory_inputs import Decision, MemoryInputs
from april_rl.start.planning.memory_plan import ENGINE_ITEMS, Phase, engine_workspace, plan_memory
from april_rl.training.learner.model.sizes import ModelSizes

# Largest share that auto takes: CUDA and vLLM need memory outside it.
_MOST = 0.85
# Share of a GPU that auto leaves free beside engines that stay awake and the learner. Activations
# are estimates: if an engine sleeps without need, a step takes seconds longer; if it stays awake
# without room, the run ends.
MARGIN_FRAC = 0.1
# KV cache that is enough for now, relative to what the samples in flight may need.
_ENOUGH = 1.25


def settle_share(
    model: ModelSizes, inputs: MemoryInputs, *, room: Room, demand: KvDemand
) -> Decision:
    """Decide engine.gpu_memory_utilization=auto: a share whose KV cache is enough for the samples
    in flight, if every phase of the learner fits beside it with a margin; `use_rest` may raise it.

    `room` is the memory of the fullest GPU. Otherwise engines will sleep during updates, and the
    share is the largest that fits beside what the learner keeps during a rollout.
    """
    if inputs.is_on_cpu or not isinstance(inputs.engine.gpu_memory_utilization, str):
        return Decision(inputs, "")
    awake, asleep = _largest_shares(model, inputs, room)
    needed = demand.total_tokens
    cache = _cache_tokens(model, inputs, awake, room=room)
    holds, beside = _holds(cache, needed), "the most that fits beside the learner's update"
    must_stay_awake = inputs.engine.sleep is Sleep.never or inputs.keeps_parked
    if inputs.engine.sleep is Sleep.always:
        share, because = asleep, "the most that fits beside what the learner keeps in a rollout"
    elif cache > _ENOUGH * needed:
        enough = (
            share
            for share in (number / 100 for number in range(1, 100))
            if _cache_tokens(model, inputs, share, room=room) >= _ENOUGH * needed
        )
        return Decision(_with_share(inputs, min(awake, next(enough))), "")
    elif must_stay_awake or cache >= needed or awake >= asleep:
        share, because = awake, f"{beside}, gives {holds}"
    else:
        share, because = (
            asleep,
            (f"for engines that sleep during updates: {awake:g}, {beside}, would give {holds}"),
        )
    reason = f"engine.gpu_memory_utilization=auto: {share:g}, {because}"
    return Decision(_with_share(inputs, share), reason)


def use_rest(model: ModelSizes, inputs: MemoryInputs, *, room: Room, demand: KvDemand) -> Decision:
    """Raise the share of an engine that stays awake to all that the decided learner leaves it."""
    plan = plan_memory(model, inputs, device_bytes=room.device)
    in_update = max(map(_of_learner, plan.phases[1:]))
    rest = _round_down((room.free - in_update) / room.device - MARGIN_FRAC)
    share = max(inputs.gpu_share, rest)
    holds = _holds(_cache_tokens(model, inputs, share, room=room), demand.total_tokens)
    return Decision(
        _with_share(inputs, share),
        f"engine.gpu_memory_utilization=auto: {share:g}, what the learner's update leaves, gives "
        f"{holds}",
    )


def alone(engine: EngineConfig) -> EngineConfig:
    """Return the settings of an engine that has no learner beside it, with auto decided."""
    if isinstance(engine.gpu_memory_utilization, str):
        return replace(engine, gpu_memory_utilization=_MOST)
    return engine


def _largest_shares(model: ModelSizes, inputs: MemoryInputs, room: Room) -> tuple[float, float]:
    """Return the largest shares of an engine that stays awake in updates, and one that sleeps."""
    never = replace(inputs.engine, sleep=Sleep.never, gpu_memory_utilization=_MOST)
    plan = plan_memory(model, replace(inputs, engine=never), device_bytes=room.device)
    rollout, *updates = plan.phases
    in_update = max(map(_of_learner, updates))
    awake = (room.free - in_update) / room.device - MARGIN_FRAC
    asleep = (room.usable - _of_learner(rollout)) / room.device
    return _round_down(awake), _round_down(asleep)


def _cache_tokens(model: ModelSizes, inputs: MemoryInputs, share: float, *, room: Room) -> int:
    return planned_kv_tokens(
        model,
        _with_share(inputs, share),
        device_bytes=room.device,
        workspace=engine_workspace(inputs),
    )


def _holds(cache: int, needed: int) -> str:
    return (
        f"a KV cache of about {cache:,} tokens, and the samples in flight on an engine may need "
        f"{needed:,}"
    )


def _of_learner(phase: Phase) -> float:
    """Return the bytes of a phase without the items of the engine."""
    return phase.total - sum(phase.items[name] for name in ENGINE_ITEMS)


def _round_down(share: float) -> float:
    """Return the share rounded down to hundredths, within the range that vLLM accepts."""
    return min(_MOST, max(0.01, math.floor(100 * share) / 100))


def _with_share(inputs: MemoryInputs, share: float) -> MemoryInputs:
    return replace(inputs, engine=replace(inputs.engine, gpu_memory_utilization=share))
