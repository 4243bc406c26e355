"""Decides which share of the layers computes its activations twice
(learner.activation_checkpointing=auto), by the memory plan.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from april_rl.learner.model.sizes import ModelSizes
from april_rl.planning.engine_share import MARGIN_FRAC
from april_rl.planning.memory_check import Room
from april_rl.planning.memory_inputs import MemoryInputs
from april_rl.planning.memory_plan import GIB, Phase, plan_memory


class Recomputation(NamedTuple):
    """The decision on learner.activation_checkpointing."""

    inputs: MemoryInputs  # with a number
    reason: str  # shown to the user; empty when there was nothing to decide


def settle_recomputation(model: ModelSizes, inputs: MemoryInputs, *, room: Room) -> Recomputation:
    """Decide learner.activation_checkpointing=auto: the smallest share of the layers with which the
    backward pass fits beside what is planned, with a margin; all layers if no share does.

    `room` is the memory of the fullest GPU, or of a worker's host on CPU. Decide whether engines
    sleep, and their share of a GPU, before.
    """
    if not isinstance(inputs.learner.activation_checkpointing, str):
        return Recomputation(inputs, "")
    can_save = model.checkpointed_bytes < model.activation_bytes
    usable = room.free - MARGIN_FRAC * (room.device or room.free)
    for count in range(model.num_layers + 1 if can_save else 1):
        chosen = _with_share(inputs, round(count / model.num_layers, 3))
        phase = _backward(model, chosen, room)
        if phase.total <= usable:
            break
    owner = "a worker" if inputs.is_on_cpu else "a GPU"
    fits = phase.total <= usable
    because = "the smallest share that leaves a margin" if fits else "which leaves no margin"
    return Recomputation(
        chosen,
        f"learner.activation_checkpointing=auto: {chosen.recomputed_share:g} ({count} of "
        f"{model.num_layers} layers compute their activations twice), {because}: {phase.name} "
        f"needs {phase.total / GIB:.1f} of {owner}'s {room.free / GIB:.1f} GiB",
    )


def _with_share(inputs: MemoryInputs, share: float) -> MemoryInputs:
    return replace(inputs, learner=replace(inputs.learner, activation_checkpointing=share))


def _backward(model: ModelSizes, inputs: MemoryInputs, room: Room) -> Phase:
    """Return the largest phase that holds activations: that of the policy or of a critic."""
    plan = plan_memory(model, inputs, device_bytes=room.device)
    found = [phase for phase in plan.phases if "activations" in phase.items]
    return max(found, key=lambda phase: phase.total)
