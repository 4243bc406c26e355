"""Decides by the memory plan which share of the layers computes its activations twice
(learner.activation_checkpointing=auto), and whether they keep their attention
(learner.keep_attention=auto).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from april_rl.start.planning.engine_share import MARGIN_FRAC
from april_rl.start.planning.memory_check import Room
from april_rl.start.planning.memory_inputs import Decision, MemoryInputs
from april_rl.start.planning.memory_plan import GIB, Phase, plan_memory
from april_rl.training.learner.model.sizes import ModelSizes, recomputed_layers


def settle_recomputation(model: ModelSizes, inputs: MemoryInputs, *, room: Room) -> Decision:
    """Decide learner.activation_checkpointing=auto: the smallest share of the layers with which the
    backward pass fits beside what is planned, with a margin; all layers if no share does. Also
    decide learner.keep_attention=auto: attention is kept if some share fits with it, because a byte
    of it saves more time than a byte of other activations.

    `room` is the memory of the fullest GPU, or of a worker's host on CPU. Whether engines sleep,
    and their share of a GPU, must be decided before.
    """
    usable = room.free - MARGIN_FRAC * (room.device or room.free)
    for chosen in _choices(model, inputs):
        phase = _backward(model, chosen, room)
        if phase.total <= usable:
            break
    decided = _describe_choice(model, inputs, chosen, fits=phase.total <= usable)
    owner = "a worker" if inputs.is_on_cpu else "a GPU"
    needs = f"{phase.name} needs {phase.total / GIB:.1f} of {owner}'s {room.free / GIB:.1f} GiB"
    return Decision(chosen, f"{decided}: {needs}" if decided else "")


def _choices(model: ModelSizes, inputs: MemoryInputs) -> Iterator[MemoryInputs]:
    """Yield the inputs with each possible value of the settings that are auto, best first."""
    learner = inputs.learner
    shares, keeps = [learner.activation_checkpointing], [learner.keep_attention]
    if isinstance(learner.activation_checkpointing, str):
        can_save = model.checkpointed_bytes < model.activation_bytes
        counts = range(model.num_layers + 1 if can_save else 1)
        shares = [round(count / model.num_layers, 3) for count in counts]
    if isinstance(learner.keep_attention, str):
        keeps = [True, False]
    for keep, share in product(keeps, shares):
        chosen = replace(learner, activation_checkpointing=share, keep_attention=keep)
        yield replace(inputs, learner=chosen)


def _describe_choice(
    model: ModelSizes, inputs: MemoryInputs, chosen: MemoryInputs, *, fits: bool
) -> str:
    """Return what was decided, for the user; empty when there was nothing to decide."""
    asked, share = inputs.learner, chosen.recomputed_share
    decided = []
    if isinstance(asked.activation_checkpointing, str):
        count = len(recomputed_layers(share, num_layers=model.num_layers))
        because = "the smallest share that leaves a margin" if fits else "which leaves no margin"
        decided.append(
            f"learner.activation_checkpointing=auto: {share:g} ({count} of {model.num_layers} "
            f"layers compute their activations twice), {because}"
        )
    if isinstance(asked.keep_attention, str) and share:
        decided.append(f"learner.keep_attention={str(chosen.keeps_attention).lower()}")
    return "; ".join(decided)


def _backward(model: ModelSizes, inputs: MemoryInputs, room: Room) -> Phase:
    """Return the largest phase that holds activations: that of the policy or of a critic."""
    plan = plan_memory(model, inputs, device_bytes=room.device)
    found = [phase for phase in plan.phases if "activations" in phase.items]
    return max(found, key=lambda phase: phase.total)
