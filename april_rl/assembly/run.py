"""Build and start the parts of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from april_rl.algorithm.advantages import Advantages, advantages_of
from april_rl.assembly.collector import build_collector, num_slots
from april_rl.assembly.decisions import decide, decide_memory
from april_rl.assembly.environments import (
    RewardsAndEnvironments,
    description_of,
    open_files_line,
    with_environments,
)
from april_rl.assembly.evaluation import build_evaluator, held_out_sets
from april_rl.assembly.packer import build_packer
from april_rl.assembly.resume_checks import check_resume, model_identity
from april_rl.assembly.rewards import build_rewards, try_rewards
from april_rl.assembly.run_directory import RunDirectory
from april_rl.assembly.workers import build_workers, training_sizes
from april_rl.batch.packing import Packer
from april_rl.checkpointing.checkpointer import Checkpointer
from april_rl.checkpointing.resume import CHECKPOINTS, Resumed
from april_rl.config import TrainConfig
from april_rl.data.prompts import PromptTable
from april_rl.data.sets import PromptSets
from april_rl.data.stream import MixedStream, PromptStream, stream_of
from april_rl.data.tokenizer import Tokenizer, load_tokenizer
from april_rl.environments.loading import Description
from april_rl.evaluation.evaluator import Evaluator
from april_rl.evaluation.held_out import HeldOut
from april_rl.memory.kv_room import kv_demand, kv_warning
from april_rl.rewards.pool import RewardPool
from april_rl.rollout.collector import Collector
from april_rl.runtime.cluster import stop_ray
from april_rl.runtime.engines import RayEngines
from april_rl.runtime.workers import Workers
from april_rl.tracking.backends import check_installed
from april_rl.tracking.labels import RunLabels
from april_rl.tracking.terminal import View
from april_rl.tracking.tracker import config_text, open_view
from april_rl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Parts of a run that the trainer uses."""

    view: View
    directory: RunDirectory  # not yet taken over
    tokenizer: Tokenizer
    outside: RewardPool | RewardsAndEnvironments
    workers: Workers
    engines: RayEngines
    prompts: PromptStream | MixedStream
    model: Mapping[str, Any]  # what must stay the same on a resume
    checkpointer: Checkpointer
    collector: Collector
    packer: Packer
    evaluator: Evaluator
    held_out: dict[str, HeldOut]
    advantages: Advantages


class _Data(NamedTuple):
    """Parts of a run that are read before a worker starts."""

    tokenizer: Tokenizer
    rewards: RewardPool
    description: Description  # of the environment
    training: list[PromptTable]
    prompts: PromptStream | MixedStream
    held_out: dict[str, HeldOut]

    @property
    def all_examples(self) -> list[Prompt]:
        """Return the first prompt of every set, held-out ones too."""
        return [rows[0] for rows in (*self.training, *self.held_out_rows)]

    @property
    def held_out_rows(self) -> list[Sequence[Prompt]]:
        """Return the prompts of every held-out set."""
        return [each.prompts for each in self.held_out.values()]


def assemble(
    config: TrainConfig,
    *,
    run_dir: Path,
    plain: Mapping[str, object],
    stack: ExitStack,
    resumed: Resumed | None,
    labels: RunLabels | None = None,
) -> Parts:
    """Return the parts of a run, started; closing `stack` ends them. Raise RunError if one fails.

    Prompts continue from the checkpoint `resumed`; the caller restores the rest. Nothing in the run
    directory is changed: that is `RunDirectory.take_over`.
    """
    stack.callback(stop_ray)
    decisions = decide(config)
    config, layout, model = decisions.config, decisions.layout, decisions.model
    directory = RunDirectory(run_dir, config, layout.shown_in(plain), resumed, labels)
    directory.check()
    packer = build_packer(config, num_ranks=layout.num_workers, hidden_size=model.hidden_size)
    view = _opened_view(config, stack)
    tell = view.message
    _tell_all(decisions.lines, tell)
    folder, identity = run_dir.resolve(), model_identity(config, model)
    data = _read_data(config, view, folder=folder, stack=stack, resumed=resumed)
    if resumed is not None:
        check_resume(config, resumed.state, model=identity)
    with view.phase("trying the reward"):
        outside = _tried(config, data, folder=folder, stack=stack, tell=tell)
    workers = build_workers(config, layout, run_dir=run_dir, sizes=training_sizes(config, layout))
    stack.callback(workers.close)
    config, engines_sleep, lines = decide_memory(decisions, workers.memory())
    _tell_all(lines, tell)
    _start(workers, view, engines_sleep=engines_sleep)
    kv_tokens = workers.kv_cache_tokens()
    demand = kv_demand(config, layout, num_slots=num_slots(config))
    _tell_all(kv_warning(demand, kv_tokens // layout.num_engines), tell)
    engines = RayEngines(workers, deterministic=config.deterministic)
    return Parts(
        view=view,
        directory=directory,
        tokenizer=data.tokenizer,
        outside=outside,
        workers=workers,
        engines=engines,
        prompts=data.prompts,
        model=identity,
        checkpointer=_checkpointer(config, directory, plain, workers, tell=tell),
        collector=build_collector(
            config, engines, outside, prompts=data.prompts, kv_cache_tokens=kv_tokens, stack=stack
        ),
        packer=packer,
        evaluator=build_evaluator(config, engines, outside, num_slots=num_slots(config)),
        held_out=data.held_out,
        advantages=advantages_of(
            config.algorithm.advantage, environment_weight=config.reward.environment_weight
        ),
    )


def _opened_view(config: TrainConfig, stack: ExitStack) -> View:
    """Return the view, after checking that the trackers are installed."""
    check_installed([backend.value for backend in config.tracking.backends])
    num_steps, num_groups = config.trainer.num_steps, config.trainer.num_groups
    title = f"{config.name}: {num_steps} steps of {num_groups} groups"
    view = open_view(title=title, num_steps=num_steps)
    stack.callback(view.close)
    return view


def _read_data(
    config: TrainConfig, view: View, *, folder: Path, stack: ExitStack, resumed: Resumed | None
) -> _Data:
    """Load the rewards of the run in `folder`, and read its prompts with the columns that they use,
    both continued where the checkpoint left them.
    """
    tokenizer = load_tokenizer(config.model.path)
    states = resumed.state.get("rewards", {}) if resumed else {}
    with view.phase("loading the reward"):
        description = description_of(config, tokenizer)
        rewards, columns = build_rewards(
            config, tokenizer, folder=folder, description=description, stack=stack, states=states
        )
    with view.phase("reading the data"):
        tell = view.message
        sets = PromptSets(
            config.data,
            tokenizer,
            seed=config.seed,
            columns=columns,
            tools=description.tools,
            has_agent=config.environment.has_agent,
            tell=tell,
        )
        training, held_out = sets.training(), held_out_sets(config, sets.load)
        num_prompts, num_groups = sum(map(len, training.values())), config.trainer.num_groups
        if num_groups > num_prompts:
            tell(
                f"trainer.num_groups={num_groups} is more than the {num_prompts} prompts of the "
                "training data: a step trains several groups of one prompt"
            )
        prompts = _stream(config, training, resumed)
    tables = [*training.values()]
    return _Data(tokenizer, rewards, description, tables, prompts, held_out)


def _tried(
    config: TrainConfig,
    data: _Data,
    *,
    folder: Path,
    stack: ExitStack,
    tell: Callable[[str], None],
) -> RewardPool | RewardsAndEnvironments:
    """Return the rewards and environments of the run in `folder`, after trying them."""
    try_rewards(config, data.rewards, data.training, held_out=data.held_out_rows, tell=tell)
    _tell_all(open_files_line(config, num_episodes=num_slots(config)), tell)
    return with_environments(
        config,
        data.rewards,
        data.tokenizer,
        description=data.description,
        examples=data.all_examples,
        folder=folder,
        stack=stack,
    )


def _tell_all(lines: Iterable[str], tell: Callable[[str], None]) -> None:
    for line in lines:
        tell(line)


def _stream(
    config: TrainConfig, training: Mapping[str, PromptTable], resumed: Resumed | None
) -> PromptStream | MixedStream:
    """Return the stream of prompts, continued where the checkpoint left it.

    A single data set has the name "". Raise DataError when the data has changed since the
    checkpoint.
    """
    weights = {name: source.weight for name, source in config.data.sources.items()} or {"": 1.0}
    prompts = stream_of(training, weights, seed=config.seed)
    if resumed is not None:
        prompts.restore(resumed.state["prompts"])
    return prompts


def _checkpointer(
    config: TrainConfig,
    directory: RunDirectory,
    plain: Mapping[str, object],
    workers: Workers,
    *,
    tell: Callable[[str], None],
) -> Checkpointer:
    labels, resumed = directory.labels, directory.resumed
    return Checkpointer(
        directory.path.resolve() / CHECKPOINTS,
        config.checkpoint,
        workers=workers,
        config_text=config_text(plain),
        about={
            "name": config.name,
            "model": config.model.path,
            "num_steps": config.trainer.num_steps,
            "best_metric": config.checkpoint.best_metric,
            "overrides": labels.overrides if labels else (),
        },
        tell=tell,
        resumed=resumed.path if resumed else None,
    )


def _start(workers: Workers, view: View, *, engines_sleep: bool) -> None:
    """Show each stage of the workers' start as a phase of its own."""
    with ExitStack() as shown:

        def on_stage(stage: str) -> None:
            shown.close()
            shown.enter_context(view.phase(stage))

        workers.start(on_stage, engines_sleep=engines_sleep)
