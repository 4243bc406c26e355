"""Decides every `auto` of a run for its machine; the lines of the start say what and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from april_rl.assembly.workers import check_machine
from april_rl.config import TrainConfig
from april_rl.config.choices import Resume
from april_rl.config.notes import inert_settings
from april_rl.learner.model.sizes import ModelSizes
from april_rl.memory.check import check_memory, least_room
from april_rl.memory.engine_sleep import settle_sleep
from april_rl.memory.inputs import memory_inputs
from april_rl.runtime.layout import Layout, choices_made, resume_line, settled
from april_rl.runtime.preflight import check_engine_takes, check_router_replay
from april_rl.supervision.host_memory import WorkerMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """Decisions that are made before a worker starts."""

    config: TrainConfig  # rollout.resume may still be auto: `decide_memory`
    layout: Layout
    model: ModelSizes
    lines: tuple[str, ...]  # to be shown


class MemoryDecisions(NamedTuple):
    """Decisions that need the memory of the workers' machines."""

    config: TrainConfig
    engines_sleep: bool  # during updates
    lines: tuple[str, ...]  # to be shown, the memory plan first


def decide(requested: TrainConfig) -> Decisions:
    """Decide layout and precision. Raise RunError when machine and model do not suffice, or the
    learner cannot compute the model.
    """
    config, layout = settled(requested)
    check_machine(config, layout)
    from april_rl.learner.model.model_sizes import model_sizes  # it needs torch

    model = model_sizes(config.model.path, config.lora)
    check_engine_takes(model, prefix_caching=config.engine.prefix_caching, is_training=True)
    check_router_replay(model, config.learner.router_replay)
    lines = (
        str(layout),
        *choices_made(requested, config),
        *inert_settings(requested, device=layout.device),
        _policy_line(model),
    )
    return Decisions(config=config, layout=layout, model=model, lines=lines)


def decide_memory(decisions: Decisions, memory: Sequence[WorkerMemory]) -> MemoryDecisions:
    """Decide whether engines sleep, and with it rollout.resume=auto. Raise PreflightError when the
    memory plan does not fit.
    """
    config, model = decisions.config, decisions.model
    inputs = memory_inputs(config, decisions.layout)
    inputs, reason = settle_sleep(model, inputs, room=least_room(memory))
    lines = [str(check_memory(model, inputs, memory)), *([reason] if reason else [])]
    if config.rollout.resume is Resume.auto:
        resume = Resume.reprefill if inputs.engine_sleeps else Resume.keep
        config = replace(config, rollout=replace(config.rollout, resume=resume))
        lines.append(resume_line(config))
    return MemoryDecisions(config, inputs.engine_sleeps, tuple(lines))


def _policy_line(model: ModelSizes) -> str:
    trained = f", {model.num_trained / 1e6:.3g} million trained" if model.has_adapters else ""
    return f"policy: {model.num_parameters / 1e6:.1f} million parameters{trained}"
