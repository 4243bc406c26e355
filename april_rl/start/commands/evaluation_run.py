"""Engines and reward for a model folder without a learner, for an evaluation or a profile of the
training data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from april_rl.config import TrainConfig
from april_rl.run.supervision.interrupts import Interrupts
from april_rl.run.tracking.samples_file import write_evaluation
from april_rl.run.tracking.terminal import ProgressPhase
from april_rl.start.assembly.evaluation import build_evaluator, held_out_sets
from april_rl.start.assembly.inputs import open_site, read_inputs, try_outside
from april_rl.start.assembly.workers import build_workers, machine_of
from april_rl.start.commands.arguments import writes_output
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
from april_rl.task.evaluation.report import SetReport
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
        """Check what can be checked, then start the engines; closing `stack` ends them. Samples go
        to `folder`. `choose` returns other sets, by the names of `config.evaluation.sets`.
        """
        stack.callback(stop_ray)
        facts = facts_of(config, machine_of(config), trains=False)
        self._draft = draft = draft_evaluation(config, facts)
        models_of(draft, trains=False)
        with writes_output(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._interrupts = folder, interrupts
        site = open_site(
            draft.config,
            folder=folder,
            stack=stack,
            title=f"evaluating {config.model.path}",
            num_steps=len(config.evaluation.sets),
            lines=draft.lines,
        )
        self._view, inputs = site.view, read_inputs(site)
        self._decode, sets = inputs.tokenizer.decode, inputs.sets
        with self._view.phase("reading the data"):
            self._sets = choose(config, sets) if choose else held_out_sets(config, sets.load)
        outside = try_outside(site, inputs, [each.prompts for each in self._sets.values()])
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
        """Return the settings that this machine would train with; raise PreflightError."""
        return config_of_training(self._draft, self._memory)

    @property
    def work(self) -> Sequence[TickWork]:
        return self._evaluator.work

    def run(self) -> dict[str, SetReport]:
        """Return the report of every set, and write its samples to samples/eval_NAME.jsonl."""
        return {name: evaluated.report for name, evaluated in self.evaluate_sets()}

    def evaluate_sets(self) -> Iterator[tuple[str, EvaluatedSet]]:
        """Evaluate the sets in order; write the samples of each to samples/eval_NAME.jsonl."""
        for num_completed, (name, held_out) in enumerate(self._sets.items(), start=1):
            with self._view.phase(f"evaluating {name}", held_out.num_responses) as phase:
                evaluated = evaluate(
                    held_out,
                    self._evaluator,
                    decode=self._decode,
                    on_progress=partial(self._progress, phase),
                )
            with writes_output(self._folder):
                path = self._folder / "samples" / f"eval_{name}.jsonl"
                write_evaluation(path, evaluated.records)
            self._view.evaluation(num_completed, evaluated.report.metrics(name).read())
            yield name, evaluated
        self._evaluator.end()

    def _progress(self, phase: ProgressPhase, completed: int) -> None:
        self._interrupts.check()
        phase.advance(completed)
