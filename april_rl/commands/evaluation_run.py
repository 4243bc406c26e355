"""Engines and reward for a model folder, without a learner: an evaluation, or a profile of the
training data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from april_rl.assembly.environments import description_of, with_environments
from april_rl.assembly.evaluation import build_evaluator, held_out_sets
from april_rl.assembly.rewards import build_rewards, try_rewards
from april_rl.assembly.workers import EngineSizes, build_workers, check_machine, context_length
from april_rl.config import TrainConfig
from april_rl.config.choices import Resume
from april_rl.data.sets import PromptSets
from april_rl.data.tokenizer import load_tokenizer
from april_rl.errors import RunError
from april_rl.evaluation.evaluate import Evaluated, evaluate
from april_rl.evaluation.held_out import HeldOut
from april_rl.evaluation.report import SetReport, set_report
from april_rl.learner.model.model_sizes import model_sizes
from april_rl.memory.check import least_room
from april_rl.memory.engine_sleep import with_resume
from april_rl.rollout.ticks import TickWork
from april_rl.runtime.cluster import stop_ray
from april_rl.runtime.engines import RayEngines
from april_rl.runtime.layout import Layout, settled
from april_rl.runtime.preflight import check_engine_takes
from april_rl.supervision.interrupts import Interrupts
from april_rl.tracking.samples_file import write_evaluation
from april_rl.tracking.terminal import Phase
from april_rl.tracking.tracker import open_view

_MOST_SEQS = 256  # requests per engine, when engine.max_num_seqs is 0


def sets_of_evaluation(config: TrainConfig, sets: PromptSets) -> dict[str, HeldOut]:
    """Return the sets of `evaluation.sets`."""
    return held_out_sets(config, sets.load)


class EvaluationRun:
    """Started engines and reward, for sampling without training."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        folder: Path,
        stack: ExitStack,
        interrupts: Interrupts,
        choose: Callable[[TrainConfig, PromptSets], dict[str, HeldOut]] = sets_of_evaluation,
    ) -> None:
        """Check what can be checked, then start the engines.

        `choose` returns the sets to sample, by the names of `config.evaluation.sets`. Closing
        `stack` ends the engines; samples are written to `folder`. Raise RunError with one message.
        """
        stack.callback(stop_ray)
        config, layout = settled(config)
        check_machine(config, layout, is_training=False)
        model = model_sizes(config.model.path, config.lora)
        check_engine_takes(model, prefix_caching=config.engine.prefix_caching, is_training=False)
        _make(folder)
        self.config = config  # as this machine would train with it, rollout.resume decided
        self._folder, self._interrupts = folder, interrupts
        num_sets = len(config.evaluation.sets)
        self._view = open_view(title=f"evaluating {config.model.path}", num_steps=num_sets)
        stack.callback(self._view.close)
        self._view.message(str(layout))
        self._tokenizer = load_tokenizer(config.model.path)
        with self._view.phase("loading the reward"):
            description = description_of(config, self._tokenizer)
            rewards, columns = build_rewards(
                config, self._tokenizer, folder=folder, description=description, stack=stack
            )
        self._sets = self._chosen(config, choose, columns=columns, tools=description.tools)
        with self._view.phase("trying the reward"):
            sets = [held_out.prompts for held_out in self._sets.values()]
            try_rewards(config, rewards, sets, tell=self._view.message)
            outside = with_environments(
                config,
                rewards,
                self._tokenizer,
                description=description,
                examples=[prompts[0] for prompts in sets],
                folder=folder,
                stack=stack,
            )
        num_seqs = _num_seqs(config, layout, self._sets)
        sizes = EngineSizes(num_seqs, context_length(config, is_training=False)[0])
        workers = build_workers(config, layout, run_dir=folder, sizes=sizes)
        stack.callback(workers.close)
        if config.rollout.resume is Resume.auto:
            room = least_room(workers.memory())
            self.config = with_resume(config, layout, model=model, room=room)
        with self._view.phase("starting vLLM"):
            workers.start_engines()
        engines = RayEngines(workers, deterministic=config.deterministic)
        self.num_engines = layout.num_engines
        num_slots = num_seqs * layout.num_engines
        self._evaluator = build_evaluator(config, engines, outside, num_slots=num_slots)

    @property
    def work(self) -> Sequence[TickWork]:
        """Return what the engines did in every tick so far."""
        return self._evaluator.work

    def _chosen(
        self,
        config: TrainConfig,
        choose: Callable[[TrainConfig, PromptSets], dict[str, HeldOut]],
        *,
        columns: Mapping[str, tuple[str, ...]],
        tools: Sequence[Mapping[str, Any]],
    ) -> dict[str, HeldOut]:
        with self._view.phase("reading the data"):
            sets = PromptSets(
                config.data,
                self._tokenizer,
                seed=config.seed,
                columns=columns,
                tools=tools,
                has_agent=config.environment.has_agent,
                tell=self._view.message,
            )
            return choose(config, sets)

    def run(self) -> dict[str, SetReport]:
        """Return the report of every set, and write its samples to samples/eval_NAME.jsonl."""
        paths = {name: chosen.path for name, chosen in self.config.evaluation.sets.items()}
        return {
            name: set_report(evaluated.held_out, evaluated.figures, path=paths[name])
            for name, evaluated in self.evaluated()
        }

    def evaluated(self) -> Iterator[tuple[str, Evaluated]]:
        """Evaluate the sets one after another, and write the samples of each to
        samples/eval_NAME.jsonl.
        """
        for num_done, (name, held_out) in enumerate(self._sets.items(), start=1):
            evaluated = self._evaluate(held_out)
            _write_samples(evaluated, self._folder / "samples" / f"eval_{name}.jsonl")
            self._view.evaluation(num_done, evaluated.figures.metrics(name).read())
            yield name, evaluated
        self._evaluator.end()

    def _evaluate(self, held_out: HeldOut) -> Evaluated:
        with self._view.phase(f"evaluating {held_out.name}", held_out.num_responses) as phase:
            return evaluate(
                held_out,
                self._evaluator,
                decode=self._tokenizer.decode,
                on_progress=partial(self._progress, phase),
            )

    def _progress(self, phase: Phase, done: int) -> None:
        self._interrupts.check()
        phase.advance(done)


def _num_seqs(config: TrainConfig, layout: Layout, sets: dict[str, HeldOut]) -> int:
    """Return the number of requests that each engine computes together."""
    most = max(held_out.num_responses for held_out in sets.values())
    return config.engine.max_num_seqs or min(_MOST_SEQS, -(-most // layout.num_engines))


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"output={folder} cannot be made: {error.strerror}") from error


def _write_samples(evaluated: Evaluated, path: Path) -> None:
    try:
        write_evaluation(path, evaluated.records)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}; see output=") from error
