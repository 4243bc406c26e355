"""One synchronous step, top to bottom, and the cadence of evaluation, samples and checkpoints
around it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from april_rl.algorithm.shaping import with_overlong_penalty
from april_rl.assembly import Parts, assemble
from april_rl.config import TrainConfig
from april_rl.data.source_metrics import source_metrics
from april_rl.evaluating import evaluate
from april_rl.interrupts import Interrupts
from april_rl.learner.mismatch import MismatchWarning
from april_rl.metrics import Mean, Metric, Metrics, Sum, merge
from april_rl.rewards.figures import reward_metrics
from april_rl.rollout.collector import Collection
from april_rl.rollout.stats import StepStats
from april_rl.tracking.samples_file import SampleRecord
from april_rl.tracking.terminal import Phase
from april_rl.tuning.engine_cost import engine_metrics
from april_rl.types import ScoredGroup


class Trainer:
    """A whole run. Use it as a context: leaving it ends every process it started."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        run_dir: Path,
        plain_config: Mapping[str, object],
        interrupts: Interrupts,
        build: Callable[..., Parts] = assemble,
    ) -> None:
        """Check everything that can be checked, then load the model.

        `plain_config` is what the run directory's config.yaml shows; `build` makes the parts, as
        `assemble` does. Raises RunError with one message for what is missing or wrong, before
        anything expensive is started where that can be known.
        """
        self._config = config
        self._run_dir, self._interrupts = run_dir, interrupts
        self._version = 0  # of the policy, counted in steps
        self._evaluated = self._exported = -1  # versions: the last one evaluated, and written
        self._counted = Metrics()  # by the reward pool, for the next step that is logged
        self._trained_tokens = 0  # response tokens of the last step
        self._mismatch_warning = MismatchWarning(config.learner.max_mismatch)
        self._under_way: tuple[ScoredGroup, ...] = ()  # collected and not trained yet
        self._num_needed = config.trainer.num_groups * config.rollout.group_size
        with ExitStack() as stack:
            self._parts = build(config, run_dir=run_dir, plain=plain_config, stack=stack)
            self._exits = stack.pop_all()
        self.collector, self.workers = self._parts.collector, self._parts.workers
        self.packer, self.tracker = self._parts.packer, self._parts.tracker

    def run(self) -> None:
        """Every step, the evaluations and checkpoints along the way, and the final checkpoint."""
        self.tracker.log(0, self._evaluate())
        for step in range(1, self._config.trainer.num_steps + 1):
            self._interrupts.check()
            started = time.perf_counter()
            metrics = self.step()
            if metrics is None:
                self._end_before(step)
                break
            step_s = time.perf_counter() - started
            timed: dict[str, Metric | float] = {
                "time/step_s": Sum(step_s),
                "throughput/trained_tokens_per_s": self._trained_tokens / step_s,
            }
            self.tracker.log(step, Metrics({**metrics, **timed, **self._after(step)}))
        self._export()

    def _end_before(self, step: int) -> None:
        """Say so, and evaluate the policy if that has not been done: in the row of the step that
        found nothing.
        """
        self.tracker.message(f"no group is left to train; the run ends before step {step}")
        if self._evaluated != self._version:
            self.tracker.log(step, self._evaluate())

    def step(self) -> Metrics | None:
        """Collect, score, update, sync: one policy version. None when there was nothing left to
        collect.
        """
        collection = self._collect()
        for note in collection.notes:
            self.tracker.message(note)
        if not collection.groups:
            return None
        self._under_way = collection.groups
        advantages = self._advantages(collection)
        batch = self.packer.pack(
            collection.groups,
            advantages,
            policy_version=self._version,
            probes=collection.probes,
        )
        with self.tracker.phase("update"):
            update = self.workers.update(batch)
        warning = self._mismatch_warning.of(update)
        if warning is not None:
            self.tracker.message(warning)
        self._under_way = ()
        with self.tracker.phase("weight sync"):
            sync = self.workers.sync_weights(self._version + 1)
        self._record_samples(collection.groups, advantages)
        self._version += 1
        self._trained_tokens = batch.num_response_tokens
        return Metrics(
            {
                **collection.stats.metrics(num_needed=self._num_needed),
                **engine_metrics(collection.stats.ticks),
                **batch.metrics,
                **self._reward_metrics(collection),
                **update,
                **collection.metrics,
                "time/rollout_s": Sum(collection.stats.time_s),
                "time/score_s": Sum(collection.stats.score_s),
                **sync,
            }
        )

    def _collect(self) -> Collection:
        trainer = self._config.trainer
        last_opening = trainer.num_steps - self._config.rollout.drain_steps
        with self._interrupts.held(), self.tracker.phase("rollout", trainer.num_groups) as phase:
            return self.collector.collect(
                self._version,
                may_open=self._version < last_opening,
                on_progress=partial(self._show, phase),
            )

    def _advantages(self, collection: Collection) -> list[NDArray[np.float64]]:
        """Of each group [G], of the rewards less the overlong penalty; every sample has a reward,
        for a group without one is dropped.
        """
        rewards = with_overlong_penalty(
            [scored.rewards for scored in collection.groups],
            collection.stats.trained_lengths,
            max_response_tokens=self._config.rollout.max_response_tokens,
            buffer_frac=self._config.algorithm.overlong_buffer_frac,
            penalty=self._config.algorithm.overlong_penalty,
        )
        return self._parts.advantages(rewards)

    def _reward_metrics(self, collection: Collection) -> Metrics:
        flat = sum(not group.has_signal for group in collection.groups)
        rejected = collection.stats.rejected_groups
        counted = merge([self._counted, self._parts.rewards.metrics()])
        self._counted = Metrics()
        return Metrics(
            {
                **reward_metrics(collection.groups),
                "reward/no_signal_frac": Mean(flat + rejected, len(collection.groups) + rejected),
                **source_metrics(collection.groups),
                **counted,
            }
        )

    def _after(self, step: int) -> Metrics:
        """What is due after a step: a checkpoint, an evaluation."""
        due = self._config.trainer.save_every
        export_s = self._export() if due and step % due == 0 else 0.0
        is_last = step == self._config.trainer.num_steps
        evaluation = Metrics()
        if is_last or step % self._config.evaluation.every == 0:
            evaluation = self._evaluate()
        return Metrics({"time/checkpoint_s": Sum(export_s), **evaluation})

    def _evaluate(self) -> Metrics:
        # The reward pool is shared with training, and so are its counters.
        self.collector.settle_scores()
        self._counted = merge([self._counted, self._parts.rewards.metrics()])
        self._evaluated = self._version
        found: dict[str, Metrics] = {}
        started = time.perf_counter()
        for name, held_out in self._parts.held_out.items():
            with self.tracker.phase(f"evaluating {name}", held_out.num_responses) as phase:
                evaluated = evaluate(
                    held_out,
                    self._parts.evaluator,
                    decode=self._parts.tokenizer.decode,
                    on_progress=partial(self._show, phase),
                )
            self.tracker.evaluation(self._version, name, evaluated.records)
            found[name] = evaluated.figures.metrics(name)
        values = {key: metric for metrics in found.values() for key, metric in metrics.items()}
        return Metrics({**values, "time/evaluation_s": Sum(time.perf_counter() - started)})

    def _export(self) -> float:
        """Write the policy as a Hugging Face folder; returns the seconds it took."""
        if self._exported == self._version:
            return 0.0
        path = self._run_dir.resolve() / "checkpoints" / f"step_{self._version}"
        started = time.perf_counter()
        with self.tracker.phase("writing the checkpoint"):
            self.workers.export(path)
        self._exported = self._version
        self.tracker.message(f"checkpoint: {path}")
        return time.perf_counter() - started

    def _record_samples(
        self, groups: Sequence[ScoredGroup], advantages: Sequence[NDArray[np.float64]]
    ) -> None:
        step = self._version + 1
        if not self.tracker.wants_samples(step):
            return
        self.tracker.samples(
            step,
            [
                SampleRecord.of(
                    sample,
                    response=self._parts.tokenizer.decode(sample.token_ids),
                    reward=reward,
                    reward_parts=parts,
                    advantage=float(advantage),
                    policy_version=self._version,
                )
                for scored, of_group in zip(groups, advantages, strict=True)
                for sample, reward, parts, advantage in zip(
                    scored.group.samples,
                    scored.rewards,
                    scored.parts or ((),) * len(scored.rewards),
                    of_group,
                    strict=True,
                )
            ],
        )

    def _keep_leftovers(self) -> None:
        """Write what was generated and not trained, also when the run ends with an error."""
        leftovers = self.collector.leftovers(under_way=self._under_way)
        if not leftovers:
            return
        path = self._run_dir / "samples" / "leftover.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in leftovers.lines())
        self.tracker.message(
            f"left over, in {path}: {len(leftovers.parked)} parked groups with "
            f"{leftovers.parked_tokens} response tokens, {len(leftovers.ready)} ready groups "
            f"(rollout.drain_steps trains them), {len(leftovers.collected)} groups of an update "
            "that did not end"
        )

    def __enter__(self) -> Self:
        """The trainer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Keep what was not trained, end every process, close every file."""
        self._exits.callback(self._interrupts.arm)
        self._exits.callback(self._keep_leftovers)  # while the tracker is open
        self._interrupts.disarm()
        self._exits.__exit__(kind, error, traceback)

    def _show(self, phase: Phase, done: int, stats: StepStats | None = None) -> None:
        """Progress, and the place where an interrupt is noticed that a library has swallowed."""
        self._interrupts.check()
        speed = stats.generated_tokens / max(stats.elapsed_s, 1e-9) if stats else 0.0
        phase.advance(done, f"{speed:,.0f} tokens/s" if stats else "")
