"""The plan of a run, in two steps: what settings and facts decide before a process starts, and what
is known only later: the memory of the workers of a training, the responses of an evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from april_rl.config import TrainConfig
from april_rl.errors import PreflightError
from april_rl.run.supervision.host_memory import WorkerMemory
from april_rl.start.planning.checks import (
    FACTS,
    MACHINE,
    MODELS,
    CountedModels,
    KnownRun,
    PlacedRun,
    failures,
    raise_all,
)
from april_rl.start.planning.engine_share import alone
from april_rl.start.planning.engine_sleep import decide_sleep_and_resume, with_resume
from april_rl.start.planning.facts import Facts, Models, count_models, read_facts
from april_rl.start.planning.layout import auto_choices, settle, unused_gpus, worker_threads
from april_rl.start.planning.machine import Machine
from april_rl.start.planning.memory_check import check_memory, least_room
from april_rl.start.planning.memory_inputs import memory_inputs
from april_rl.start.planning.notes import inert_settings, short_stop_deadline
from april_rl.start.planning.sizes import Sizes, evaluation_sizes, tick_steps, training_sizes
from april_rl.training.learner.model.sizes import ModelSizes
from april_rl.training.runtime.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A plan before its second step: settings that only that step can decide may be auto."""

    config: TrainConfig
    layout: Layout
    facts: Facts
    lines: tuple[str, ...]  # shown to the user


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingDraft(Draft):
    """The draft of a training, which knows its sizes."""

    sizes: Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A complete plan, from which a run is built. Of what its parts read, only engine.sleep may
    still be auto, and only on a CPU, where no engine sleeps.
    """

    config: TrainConfig
    layout: Layout
    sizes: Sizes
    engines_sleep: bool = False  # during updates
    lines: tuple[str, ...] = ()  # shown to the user


def facts_of(requested: TrainConfig, machine: Machine, *, trains: bool) -> Facts:
    """Read the models. Raise PreflightError for one that cannot be used, and for all that the
    machine lacks then.
    """
    from april_rl.start.planning.model import without_network_go_offline  # it needs transformers

    without_network_go_offline()
    try:
        return read_facts(requested, machine, trains=trains)
    except PreflightError as error:
        config, layout = settle(requested, gpus=machine.num_gpus, where=machine.name)
        run = PlacedRun(config=config, layout=layout, machine=machine, trains=trains)
        raise_all([*failures(MACHINE, run), error])
        raise


def draft_training(requested: TrainConfig, facts: Facts) -> TrainingDraft:
    """Decide layout, precision, threads and ticks; raise RunError with all that is lacking."""
    config, layout = _settle_rest(requested, facts)
    sizes = training_sizes(config, layout)
    _check(config, layout, facts, trains=True)
    machine = facts.machine
    lines = (
        str(layout),
        *unused_gpus(layout, gpus=machine.num_gpus, where=machine.name),
        *auto_choices(requested, config),
        *inert_settings(requested, device=layout.device),
    )
    config = _with_sizes(config, sizes)
    return TrainingDraft(config=config, layout=layout, facts=facts, lines=lines, sizes=sizes)


def draft_evaluation(requested: TrainConfig, facts: Facts) -> Draft:
    """Decide what `draft_training` does for a run without a learner."""
    config, layout = _settle_rest(requested, facts)
    _check(config, layout, facts, trains=False)
    return Draft(config=config, layout=layout, facts=facts, lines=(str(layout),))


def models_of(draft: Draft, *, trains: bool) -> Models:
    """Count the models of a draft. Raise RunError when learner or engine cannot compute one."""
    models = count_models(draft.facts, draft.config)
    raise_all(failures(MODELS, CountedModels(draft.config, models, trains)))
    return models


def model_lines(config: TrainConfig, facts: Facts, models: Models) -> Iterator[str]:
    """Yield the lines about the models that are shown at the start of a training."""
    yield from short_stop_deadline(config, models.num_trained)
    yield policy_line(models.policy)
    if facts.critic is not None and models.beside.critic is not None:
        trained = models.beside.critic.num_trained / 1e6
        yield f"critic: from {facts.critic.path}, {trained:.1f} million trained"
    if facts.teacher is not None and models.beside.teacher is not None:
        size = models.beside.teacher.num_parameters / 1e6
        yield f"teacher: {facts.teacher.path}, {size:.1f} million parameters"
    if config.teacher.base_url:
        yield f"teacher: {config.teacher.model} at {config.teacher.base_url}"


def plan_training(draft: TrainingDraft, models: Models, memory: Sequence[WorkerMemory]) -> Plan:
    """Complete the draft with the memory of each worker; raise PreflightError if too little."""
    layout, model = draft.layout, models.policy
    inputs = memory_inputs(draft.config, layout, models.beside)
    decided = decide_sleep_and_resume(draft.config, inputs, model=model, room=least_room(memory))
    table = str(check_memory(model, decided.inputs, memory))
    return Plan(
        config=decided.config,
        layout=layout,
        sizes=draft.sizes,
        engines_sleep=decided.inputs.engine_sleeps,
        lines=(table, *decided.reasons),
    )


def plan_evaluation(draft: Draft, *, num_responses: int) -> Plan:
    """Complete the draft for the responses of the largest set; an engine has its GPU alone."""
    config = replace(draft.config, engine=alone(draft.config.engine))
    sizes = evaluation_sizes(config, draft.layout, num_responses=num_responses)
    return Plan(config=_with_sizes(config, sizes), layout=draft.layout, sizes=sizes)


def config_of_training(draft: Draft, memory: Sequence[WorkerMemory]) -> TrainConfig:
    """Return a training's settings on these workers, fit or not, from an evaluation's draft."""
    facts = read_facts(draft.config, draft.facts.machine, trains=True)
    models = count_models(facts, draft.config)
    inputs = memory_inputs(draft.config, draft.layout, models.beside)
    return with_resume(draft.config, inputs, model=models.policy, room=least_room(memory))


def policy_line(model: ModelSizes) -> str:
    """Return the line about the size of the policy that is shown at the start."""
    trained = f", {model.num_trained / 1e6:.3g} million trained" if model.has_adapters else ""
    return f"policy: {model.num_parameters / 1e6:.1f} million parameters{trained}"


def _settle_rest(requested: TrainConfig, facts: Facts) -> tuple[TrainConfig, Layout]:
    machine = facts.machine
    config, layout = settle(requested, gpus=machine.num_gpus, where=machine.name)
    threads = config.runtime.threads
    if isinstance(threads, str):  # auto
        threads = worker_threads(layout, machine)
    steps = tick_steps(config, num_engines=layout.num_engines)
    rollout = replace(config.rollout, tick_steps=steps)
    runtime = replace(config.runtime, threads=threads)
    return replace(config, rollout=rollout, runtime=runtime), layout


def _with_sizes(config: TrainConfig, sizes: Sizes) -> TrainConfig:
    longest, num_seqs = sizes.max_model_len, sizes.max_num_seqs
    engine = replace(config.engine, max_model_len=longest, max_num_seqs=num_seqs)
    return replace(config, engine=engine)


def _check(config: TrainConfig, layout: Layout, facts: Facts, *, trains: bool) -> None:
    run = KnownRun(config=config, layout=layout, machine=facts.machine, facts=facts, trains=trains)
    raise_all(failures(FACTS, run))
