"""Engines and reward for a model folder without a learner, for an evaluation or a profile of the
training data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from april_rl.config import TrainConfig
from april_rl.errors import RunError
from april_rl.run.supervision.interrupts import Interrupts
from april_rl.run.tracking.samples_file import write_evaluation
from april_rl.run.tracking.terminal import ProgressPhase
from april_rl.run.tracking.tracker import open_view
from april_rl.start.assembly.evaluation import build_evaluator, held_out_sets
from april_rl.start.assembly.inputs import RunSite, read_inputs, try_outside
from april_rl.start.assembly.workers import build_workers, machine_of
from april_rl.start.planning.model import without_network_go_offline
from april_rl.start.planning.plan import (
    config_of_training,
    draft_evaluation,
    facts_of,
    models_of,
    plan_evaluation,
)
from april_rl.task.data.sets import PromptSets
from april_rl.task.evaluation.evaluate import EvaluatedSet, evaluate
from april_rl.task.evaluation.held_out import HeldOut
from april_rl.task.evaluation.report import SetReport, set_report
from april_rl.training.rollout.ticks import TickWork
from april_rl.training.runtime.cluster import stop_ray


class EvaluationRun:
    """Started engines and reward, for sampling without training."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        folder: Path,
        stack: ExitStack,
        interrupts: Interrupts,
        choose: Callable[[TrainConfig, PromptSets], dict[str, HeldOut]] | None = None,
    ) -> None:
        """Check what can be checked, then start the engines.

        `choose` returns other sets to sample, by the names of `config.evaluation.sets`. Closing
        `stack` ends the engines; samples are written to `folder`. Raise RunError with one message.
        """
        stack.callback(stop_ray)
        without_network_go_offline()
        facts = facts_of(config, machine_of(config), trains=False)
        self._draft = draft = draft_evaluation(config, facts)
        models_of(draft, trains=False)
        config = draft.config
        _make(folder)
        self._folder, self._interrupts = folder, interrupts
        num_sets = len(config.evaluation.sets)
        self._view = open_view(title=f"evaluating {config.model.path}", num_steps=num_sets)
        stack.callback(self._view.close)
        for line in draft.lines:
            self._view.message(line)
        site = RunSite(config=config, folder=folder, view=self._view, stack=stack)
        inputs = read_inputs(site)
        self._tokenizer = inputs.tokenizer
        with self._view.phase("reading the data"):
            sets = inputs.sets
            self._sets = choose(config, sets) if choose else held_out_sets(config, sets.load)
        prompts = [held_out.prompts for held_out in self._sets.values()]
        outside = try_outside(site, inputs, prompts)
        self.num_engines = draft.layout.num_engines
        num_responses = max(held_out.num_responses for held_out in self._sets.values())
        plan = plan_evaluation(draft, num_responses=num_responses)
        workers = build_workers(plan.config, plan.layout, run_dir=folder, sizes=plan.sizes)
        stack.callback(workers.close)
        self._memory = workers.memory()
        with self._view.phase("starting vLLM"):
            workers.start_engines()
        engines = workers.engines(deterministic=config.deterministic)
        num_slots = plan.sizes.num_slots
        self._evaluator = build_evaluator(plan.config, engines, outside, num_slots=num_slots)

    def training_config(self) -> TrainConfig:
        """Return the settings that this machine would train with. Raise PreflightError when a model
        beside the policy cannot be used.
        """
        return config_of_training(self._draft, self._memory)

    @property
    def work(self) -> Sequence[TickWork]:
        return self._evaluator.work

    def run(self) -> dict[str, SetReport]:
        """Return the report of every set, and write its samples to samples/eval_NAME.jsonl."""
        sets = self._draft.config.evaluation.sets
        paths = {name: chosen.path for name, chosen in sets.items()}
        return {
            name: set_report(evaluated.held_out, evaluated.figures, path=paths[name])
            for name, evaluated in self.evaluate_sets()
        }

    def evaluate_sets(self) -> Iterator[tuple[str, EvaluatedSet]]:
        """Evaluate the sets in order; write the samples of each to samples/eval_NAME.jsonl."""
        for num_completed, (name, held_out) in enumerate(self._sets.items(), start=1):
            evaluated = self._evaluate(held_out)
            _write_samples(evaluated, self._folder / "samples" / f"eval_{name}.jsonl")
            self._view.evaluation(num_completed, evaluated.figures.metrics(name).read())
            yield name, evaluated
        self._evaluator.end()

    def _evaluate(self, held_out: HeldOut) -> EvaluatedSet:
        with self._view.phase(f"evaluating {held_out.name}", held_out.num_responses) as phase:
            return evaluate(
                held_out,
                self._evaluator,
                decode=self._tokenizer.decode,
                on_progress=partial(self._progress, phase),
            )

    def _progress(self, phase: ProgressPhase, completed: int) -> None:
        self._interrupts.check()
        phase.advance(completed)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"output={folder} cannot be made: {error.strerror}") from error


def _write_samples(evaluated: EvaluatedSet, path: Path) -> None:
    try:
        write_evaluation(path, evaluated.records)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}; see output=") from error
