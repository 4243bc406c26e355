"""The plan of a run, in two steps: what settings, machine and model decide before a process starts,
and what the memory of the workers' machines decides after their processes have started.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from april_rl.config import TrainConfig
from april_rl.run.supervision.host_memory import WorkerMemory
from april_rl.start.planning.beside import read_beside
from april_rl.start.planning.engine_share import alone
from april_rl.start.planning.engine_sleep import decide_sleep_and_resume, with_resume
from april_rl.start.planning.layout import auto_choices, settle, unused_gpus, worker_threads
from april_rl.start.planning.machine import Machine
from april_rl.start.planning.memory_check import check_memory, least_room
from april_rl.start.planning.memory_inputs import Beside, memory_inputs
from april_rl.start.planning.model import read_model
from april_rl.start.planning.notes import inert_settings, short_stop_deadline
from april_rl.start.planning.preflight import check_engine_takes, check_router_replay, check_start
from april_rl.start.planning.sizes import tick_steps, training_sizes
from april_rl.training.learner.model.sizes import ModelSizes
from april_rl.training.runtime.layout import Layout

_MOST_SEQS = 256  # requests that an engine computes together in an evaluation, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A plan without the decisions that need the workers' memory: engine.sleep and rollout.resume
    are as they were set.
    """

    config: TrainConfig
    layout: Layout
    model: ModelSizes
    beside: Beside
    lines: tuple[str, ...]  # shown to the user


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A complete plan, from which a run is built. Of what workers and rollout read only α may still
    be auto, and on a CPU, where no engine sleeps, engine.sleep.
    """

    config: TrainConfig
    layout: Layout
    engines_sleep: bool  # during updates
    lines: tuple[str, ...]  # shown to the user, the memory plan first


def draft(requested: TrainConfig, machine: Machine, *, is_training: bool = True) -> Draft:
    """Decide layout, precision, threads and ticks. With `is_training` false, there is no learner to
    plan for.

    Raise RunError when machine and model do not suffice, or the learner cannot compute the model.
    """
    config, layout = settle(requested, gpus=machine.num_gpus, where=machine.name)
    steps = tick_steps(config, num_engines=layout.num_engines)
    threads = config.runtime.threads
    if isinstance(threads, str):  # auto
        threads = worker_threads(layout, machine)
    config = replace(
        config,
        rollout=replace(config.rollout, tick_steps=steps),
        runtime=replace(config.runtime, threads=threads),
    )
    if is_training:
        training_sizes(config, layout)
    model_config = check_start(config, layout, machine, is_training=is_training)
    from april_rl.training.learner.model.model_sizes import model_sizes  # it needs torch

    model = model_sizes(model_config, config.lora)
    prefix_caching = config.engine.prefix_caching
    check_engine_takes(model, prefix_caching=prefix_caching, is_training=is_training)
    beside = read_beside(config, model_config) if is_training else Beside()
    if is_training:
        check_router_replay(model, config.learner.router_replay)
    num_trained = model.num_trained + (beside.critic.num_trained if beside.critic else 0)
    lines = (
        str(layout),
        *unused_gpus(layout, gpus=machine.num_gpus, where=machine.name),
        *auto_choices(requested, config),
        *inert_settings(requested, device=layout.device),
        *(short_stop_deadline(config, num_trained) if is_training else ()),
        policy_line(model),
        *_beside_lines(config, beside),
    )
    return Draft(config=config, layout=layout, model=model, beside=beside, lines=lines)


def plan(drafted: Draft, memory: Sequence[WorkerMemory]) -> Plan:
    """Complete the draft with the memory of each worker: engine.sleep, rollout.resume and the sizes
    of an engine. Raise PreflightError when the memory plan does not fit.
    """
    config, model, layout = drafted.config, drafted.model, drafted.layout
    inputs = memory_inputs(config, layout, drafted.beside)
    decided = decide_sleep_and_resume(config, inputs, model=model, room=least_room(memory))
    table = str(check_memory(model, decided.inputs, memory))
    engine = replace(decided.config.engine, **training_sizes(config, layout)._asdict())
    return Plan(
        config=replace(decided.config, engine=engine),
        layout=layout,
        engines_sleep=decided.inputs.engine_sleeps,
        lines=(table, *decided.reasons),
    )


def training_config(drafted: Draft, memory: Sequence[WorkerMemory]) -> TrainConfig:
    """Return the settings that a training on these workers would have, whether or not it fits; the
    draft is one without a learner.
    """
    config = drafted.config
    beside = read_beside(config, read_model(config.model.path))
    inputs = memory_inputs(config, drafted.layout, beside)
    return with_resume(config, inputs, model=drafted.model, room=least_room(memory))


def evaluation_config(drafted: Draft, *, num_responses: int) -> TrainConfig:
    """Complete the settings of a run without a learner: engine.max_num_seqs, which the set with the
    most responses decides, and the engine's share of a GPU, which nothing else needs.
    """
    engine, num_engines = alone(drafted.config.engine), drafted.layout.num_engines
    num_seqs = engine.max_num_seqs
    if isinstance(num_seqs, str):  # auto
        num_seqs = min(_MOST_SEQS, math.ceil(num_responses / num_engines))
    return replace(drafted.config, engine=replace(engine, max_num_seqs=num_seqs))


def policy_line(model: ModelSizes) -> str:
    """Return the line about the size of the policy that is shown at the start."""
    trained = f", {model.num_trained / 1e6:.3g} million trained" if model.has_adapters else ""
    return f"policy: {model.num_parameters / 1e6:.1f} million parameters{trained}"


def _beside_lines(config: TrainConfig, beside: Beside) -> Iterator[str]:
    """Yield the lines about a teacher and a critic that are shown at the start."""
    if beside.critic is not None:
        path = config.critic.path or config.model.path
        yield f"critic: from {path}, {beside.critic.num_trained / 1e6:.1f} million trained"
    if beside.teacher is not None:
        size = beside.teacher.num_parameters / 1e6
        yield f"teacher: {config.teacher.path}, {size:.1f} million parameters"
    if config.teacher.base_url:
        yield f"teacher: {config.teacher.model} at {config.teacher.base_url}"
