"""Build and start the parts of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from april_rl.config import TrainConfig
from april_rl.config.store import folder_options
from april_rl.run.checkpointing.checkpointer import Checkpointer, Savers
from april_rl.run.checkpointing.resume import CHECKPOINTS, Resumed
from april_rl.run.tracking.backends import check_installed
from april_rl.run.tracking.labels import RunLabels
from april_rl.run.tracking.tracker import config_text
from april_rl.start.assembly.collector import build_collector
from april_rl.start.assembly.environments import open_files_line
from april_rl.start.assembly.evaluation import build_evaluator, held_out_sets
from april_rl.start.assembly.inputs import (
    Inputs,
    RunSite,
    open_site,
    read_inputs,
    teacher_server,
    try_outside,
)
from april_rl.start.assembly.own_functions import USER_CODE, try_on_groups
from april_rl.start.assembly.packer import build_batches
from april_rl.start.assembly.resume_checks import check_resume, model_identity
from april_rl.start.assembly.run_directory import take_over
from april_rl.start.assembly.sampler import sampler_maker
from april_rl.start.assembly.workers import build_workers, machine_of
from april_rl.start.planning.checks import failures, raise_all
from april_rl.start.planning.kv_room import kv_demand, kv_warning
from april_rl.start.planning.plan import (
    Plan,
    draft_training,
    facts_of,
    model_lines,
    models_of,
    plan_training,
)
from april_rl.task.data.prompts import PromptTable
from april_rl.task.data.stream import MixedStream, PromptStream, stream_of
from april_rl.task.evaluation.evaluate import evaluate_all
from april_rl.task.evaluation.held_out import HeldOut
from april_rl.training.parts import RunParts
from april_rl.training.rollout.ports import Engines
from april_rl.training.runtime.cluster import stop_ray
from april_rl.training.runtime.layout import Layout
from april_rl.training.runtime.workers import Workers


def assemble(
    settings: TrainConfig,
    *,
    run_dir: Path,
    plain: Mapping[str, object],
    stack: ExitStack,
    resumed: Resumed | None,
    labels: RunLabels | None = None,
) -> RunParts:
    """Start the parts of a run; closing `stack` ends them. Prompts continue from `resumed`; the
    caller restores the rest. `run_dir` is not changed. Raise RunError if a part fails.
    """
    stack.callback(stop_ray)
    draft = draft_training(settings, facts_of(settings, machine_of(settings), trains=True))
    models = models_of(draft, trains=True)
    raise_all(failures(USER_CODE, draft.config))
    lines = (*draft.lines, *model_lines(draft.config, draft.facts, models))
    site = _training_site(draft.config, run_dir, stack, lines=lines)
    inputs = read_inputs(site, states=resumed.state.get("rewards", {}) if resumed else None)
    prompts, training, held_out = _read_prompts(site, inputs, resumed)
    identity = model_identity(draft.config, models.policy)
    if resumed is not None:
        check_resume(draft.config, resumed.state, model=identity)
    num_slots = draft.sizes.num_slots
    site.show(open_files_line(draft.config, inputs.description, num_episodes=num_slots))
    try_on_groups(draft.config, training[0][0])
    outside = try_outside(
        site, inputs, training, held_out=[each.prompts for each in held_out.values()]
    )
    teacher = teacher_server(site, inputs)
    workers = build_workers(draft.config, draft.layout, run_dir=run_dir, sizes=draft.sizes)
    stack.callback(workers.close)
    plan = plan_training(draft, models, workers.memory())
    site.show(plan.lines)
    engines = _start(workers, plan, site)
    config, decode = plan.config, inputs.tokenizer.decode
    shown = _plain(plain, plan.layout)
    evaluator = build_evaluator(config, engines, outside, num_slots=num_slots)
    return RunParts(
        view=site.view,
        take_over=partial(take_over, run_dir, config, shown=shown, resumed=resumed, labels=labels),
        decode=decode,
        outside=outside,
        workers=workers,
        save_prompts=prompts.save,
        model=identity,
        checkpointer=_checkpointer(site, workers, resumed, plain=plain, labels=labels),
        collector=build_collector(config, engines, outside, prompts=prompts),
        batches=build_batches(plan, models.policy, teacher.logprobs if teacher else None),
        evaluate=partial(evaluate_all, held_out.values(), evaluator, decode=decode),
    )


def _plain(plain: Mapping[str, object], layout: Layout) -> dict[str, object]:
    """Return the configuration as a run shows it, with the actual number of workers."""
    section = plain.get("runtime")
    runtime = section if isinstance(section, Mapping) else {}
    return {**plain, "runtime": {**runtime, "num_workers": layout.num_workers}}


def _training_site(
    config: TrainConfig, run_dir: Path, stack: ExitStack, *, lines: Iterable[str]
) -> RunSite:
    check_installed([backend.value for backend in config.tracking.backends])
    num_steps, num_groups = config.trainer.num_steps, config.trainer.num_groups
    title = f"{config.name}: {num_steps} steps of {num_groups} groups"
    return open_site(
        config, folder=run_dir, stack=stack, title=title, num_steps=num_steps, lines=lines
    )


def _read_prompts(
    site: RunSite, inputs: Inputs, resumed: Resumed | None
) -> tuple[PromptStream | MixedStream, list[PromptTable], dict[str, HeldOut]]:
    """Return the stream of training prompts, continued on a resume, tables and held-out sets."""
    config, view = site.config, site.view
    with view.phase("reading the data"):
        training = inputs.sets.training()
        held_out = held_out_sets(config, inputs.sets.load)
        num_prompts, num_groups = sum(map(len, training.values())), config.trainer.num_groups
        if num_groups > num_prompts:
            view.message(
                f"trainer.num_groups={num_groups} is more than the {num_prompts} prompts of the "
                "training data: a step trains several groups of one prompt"
            )
        weights = {name: each.weight for name, each in config.data.sources.items()} or {"": 1.0}
        new_sampler = sampler_maker(config.data, seed=config.seed)
        stream = stream_of(training, weights, seed=config.seed, new_sampler=new_sampler)
        if resumed is not None:
            stream.restore(resumed.state["prompts"])
    return stream, [*training.values()], held_out


def _checkpointer(
    site: RunSite,
    workers: Savers,
    resumed: Resumed | None,
    *,
    plain: Mapping[str, object],
    labels: RunLabels | None,
) -> Checkpointer:
    config = site.config
    return Checkpointer(
        site.folder / CHECKPOINTS,
        config.checkpoint,
        workers=workers,
        config_text=config_text(plain),
        about={
            "name": config.name,
            "model": config.model.path,
            "num_steps": config.trainer.num_steps,
            "best_metric": config.checkpoint.best_metric,
            "overrides": (*folder_options(), *(labels.overrides if labels else ())),
        },
        tell=site.view.message,
        resumed=resumed.path if resumed else None,
    )


def _start(workers: Workers, plan: Plan, site: RunSite) -> Engines:
    """Start the workers as planned, each stage shown as a phase; return the engines."""
    config, layout = plan.config, plan.layout
    with ExitStack() as shown:

        def on_stage(stage: str) -> None:
            shown.close()
            shown.enter_context(site.view.phase(stage))

        workers.start(config, sleeps=plan.engines_sleep, on_stage=on_stage)
    kv_cache_tokens = workers.kv_cache_tokens() // layout.num_engines
    site.show(kv_warning(kv_demand(config, layout), kv_cache_tokens))
    return workers.engines(deterministic=config.deterministic)
