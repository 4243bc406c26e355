"""Trainer: one synchronous step, and when evaluations, samples and checkpoints are due."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

from april_rl.config import TrainConfig
from april_rl.errors import ExportError, RunError
from april_rl.metrics import Mean, Metric, Metrics, Sum, merge
from april_rl.run.checkpointing.checkpointer import LEARNER
from april_rl.run.checkpointing.exports import export_path
from april_rl.run.checkpointing.progress import Progress
from april_rl.run.checkpointing.resume import Resumed
from april_rl.run.supervision.interrupts import Interrupts
from april_rl.run.supervision.memory_usage import controller_memory
from april_rl.run.tracking.samples_file import records_of
from april_rl.run.tracking.terminal import ProgressPhase, View
from april_rl.run.tracking.tracker import RunDirectoryError
from april_rl.training.parts import RunParts
from april_rl.training.recorded_steps import RecordedStep, RecordedSteps
from april_rl.training.rollout.collector import Collection
from april_rl.training.rollout.measures.reward_metrics import reward_metrics
from april_rl.training.rollout.measures.rollout_metrics import rollout_metrics
from april_rl.training.rollout.measures.timeline import timeline_of
from april_rl.training.runtime.step_profiler import StepProfiler
from april_rl.training.updates import Updates
from april_rl.types import OnStep, ScoredGroup


class Trainer:
    """One training run. Use it as a context manager: leaving it ends every process it started."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        run_dir: Path,
        plain_config: Mapping[str, object],
        interrupts: Interrupts,
        resumed: Resumed | None = None,
        build: Callable[..., RunParts],
        on_step: OnStep | None = None,
    ) -> None:
        """Check everything that can be checked, load the model, and take over the run directory.

        `plain_config` is the configuration as the run directory's config.yaml shows it. With
        `resumed`, the run continues from that checkpoint. `build` is called as `assemble` of
        `start/assembly`. `on_step` gets the row of every step; the run ends when it returns True.
        Raise RunError with one message if something is missing or wrong: if possible before any
        process is started, and always before anything in the run directory is changed.
        """
        self._config = config
        self._run_dir, self._interrupts = run_dir, interrupts
        self._on_step = on_step or (lambda _step, _row: None)
        self._progress = Progress()
        self._is_enough = False  # whether `on_step` has returned True
        self._is_saved = False  # whether the checkpoint of a stopped run is complete
        self._under_way: tuple[ScoredGroup, ...] = ()  # groups not trained yet
        self._num_needed = config.trainer.num_groups * config.rollout.group_size
        with ExitStack() as stack:
            self._parts = build(
                config, run_dir=run_dir, plain=plain_config, stack=stack, resumed=resumed
            )
            self._collector, self._workers = self._parts.collector, self._parts.workers
            self._checkpointer = self._parts.checkpointer
            view = self._parts.view
            self._updates = Updates(self._workers, config, run_dir, tell=view.message)
            keep = config.trainer.record_steps
            self._recorded = RecordedSteps(run_dir, keep=keep, tell=view.message)
            if resumed is not None:
                self._restore(resumed, view)
            self._tracker = stack.enter_context(self._parts.take_over(view))
            self._profiler = StepProfiler(
                config.profiler.steps, self._workers, self._tracker, run_dir
            )
            self._exits = stack.pop_all()

    def count(self, metrics: Metrics) -> None:
        """Add metrics to the row of the next step."""
        self._progress.counted = merge([self._progress.counted, metrics])

    @property
    def version(self) -> int:
        """Return the policy version, counted in steps."""
        return self._progress.version

    @property
    def last_checkpoint(self) -> Path | None:
        """Return the checkpoint that was written last, or else the one the run resumed from."""
        return self._checkpointer.last

    def run(self) -> None:
        """Train all steps, with evaluations and checkpoints as due, and write the final checkpoint.

        On a signal or trainer.max_hours, park the samples in flight and write a checkpoint with
        every token; after Ctrl-C, then raise KeyboardInterrupt. The same is saved before an error
        that leaves workers and disk as they were.
        """
        with self._interrupts.hold(deadline_s=self._config.checkpoint.stop_deadline_s):
            try:
                self._run()
            except KeyboardInterrupt:
                self._stop(self._interrupts.reason)
                if self._interrupts.is_person:
                    raise
            except (RunDirectoryError, ExportError) as error:
                raise type(error)(f"{error}; {self._how_to_continue()}") from error
            except RunError:
                if not self._workers.has_failed:
                    self._stop_after_error("an error")
                raise

    def _run(self) -> None:
        if self._progress.evaluated is None:  # a checkpoint of step 0 already has its row
            self._log(0, self._evaluate())
        if self._progress.row is not None:
            self._end_step(self._progress.row)
        for step in range(self._progress.version + 1, self._config.trainer.num_steps + 1):
            if self._is_enough:
                self._end_before(step, "on_step returned True")
                break
            self._interrupts.check()
            with self._profiler.step(step):
                started = time.perf_counter()
                metrics = self.step()
                step_s = time.perf_counter() - started
            if metrics is None:
                self._end_before(step, "no group is left to train")
                break
            num_tokens = metrics.read()["throughput/trained_tokens"]
            timed: dict[str, Metric | float] = {
                "time/step_s": Sum(step_s),
                "throughput/trained_tokens_per_s": num_tokens / step_s,
            }
            self._progress.row = Metrics({**metrics, **timed})
            self._end_step(self._progress.row)
            self._updates.check()
        self._save(is_finished=True)
        self._checkpointer.finish()
        self._export()  # last, so that a failure costs no training

    def _how_to_continue(self) -> str:
        """Return what to do when the disk has failed, and what is saved."""
        last = self.last_checkpoint
        saved = f"from {last}" if last else "from the beginning, since no checkpoint was written"
        return f"make room there, then resume=auto hydra.run.dir={self._run_dir} continues {saved}"

    def _end_step(self, row: Metrics) -> None:
        """Run the evaluation and checkpoints due after a step, and log its metrics."""
        step = self._progress.version
        self._log(step, Metrics({**row, **self._after(step)}))

    def _log(self, step: int, metrics: Metrics) -> None:
        row = self._tracker.log(step, metrics)
        self._progress.row = None
        with ExitStack() as on_error:
            on_error.callback(self._stop_after_error, "an error of on_step")
            self._is_enough = bool(self._on_step(step, row))
            on_error.pop_all()

    def _stop_after_error(self, reason: str) -> None:
        """Write a checkpoint if possible; the error that ends the run matters more."""
        try:
            self._stop(reason)
        except RunError as error:
            self._tracker.message(f"no checkpoint could be written: {error}")

    def _stop(self, reason: str) -> None:
        """Write a checkpoint with everything that the run has, and say how to continue."""
        self._save(with_row=True)
        self._is_saved = self._checkpointer.finish()
        self._tracker.message(
            f"stopped after step {self._progress.version} by {reason}; "
            f"continue with resume=auto hydra.run.dir={self._run_dir}"
        )

    def _end_before(self, step: int, reason: str) -> None:
        """Report why the run ends, and evaluate the last version if it was not evaluated yet."""
        self._tracker.message(f"{reason}; the run ends before step {step}")
        if self._progress.evaluated != self._progress.version:
            self._tracker.amend(self._progress.version, self._evaluate())

    def step(self) -> Metrics | None:
        """Make a policy version; return its metrics, or None if no group was left to collect."""
        collection = self._collect()
        for note in collection.notes:
            self._tracker.message(note)
        if not collection.groups:
            return None
        with ExitStack() as on_error:
            on_error.callback(self._collector.take_back, collection)
            batch, advantages = self._parts.batches.make(
                collection.groups,
                probes=collection.probes,
                policy_version=self._progress.version,
                phase=self._tracker.phase,
                look=self._interrupts.check,
            )
            self._checkpointer.poll()
            on_error.pop_all()
        recorded = RecordedStep(collection.groups, collection.probes)
        self._recorded.write(self._progress.version + 1, recorded)
        self._under_way = collection.groups
        records = partial(
            records_of,
            collection.groups,
            advantages,
            decode=self._parts.decode,
            policy_version=self._progress.version,
        )
        with self._tracker.phase(self._updates.phase):
            update = self._updates.make(batch, step=self._progress.version + 1, records=records)
        self._under_way = ()
        with self._tracker.phase("weight sync"):
            sync = self._workers.sync_weights(self._progress.version + 1)
        self._progress.version += 1
        if self._tracker.wants_samples(self._progress.version):
            timeline = timeline_of(collection.record).plain()
            self._tracker.samples(self._progress.version, records(), timeline)
        of_step = [
            rollout_metrics(collection.record, num_needed=self._num_needed),
            batch.metrics,
            self._reward_metrics(collection),
            update,
            collection.metrics,
            sync,
            controller_memory(),
        ]
        return merge(of_step)

    def _collect(self) -> Collection:
        trainer = self._config.trainer
        last_opening = trainer.num_steps - self._config.rollout.drain_steps
        with self._tracker.phase("rollout", trainer.num_groups) as phase:
            return self._collector.collect(
                self._progress.version,
                may_open=self._progress.version < last_opening,
                on_progress=partial(self._show, phase),
            )

    def _reward_metrics(self, collection: Collection) -> Metrics:
        flat = sum(not group.has_signal for group in collection.groups)
        rejected = collection.record.groups.lost.rejected
        counted = merge([self._progress.counted, self._parts.outside.metrics()])
        self._progress.counted = Metrics()
        return Metrics(
            {
                **reward_metrics(collection.groups),
                "reward/no_signal_frac": Mean(flat + rejected, len(collection.groups) + rejected),
                **counted,
            }
        )

    def _after(self, step: int) -> Metrics:
        """Write the export and the checkpoint and run the evaluation due after `step`."""
        due, started = self._config.checkpoint.export_every_steps, time.perf_counter()
        if due and step % due == 0:
            self._try_to_export()
        export_s = time.perf_counter() - started
        is_last = step == self._config.trainer.num_steps
        evaluation = Metrics()
        if is_last or step % self._config.evaluation.every == 0:
            evaluation = self._evaluate()
        self._checkpointer.poll()
        save_s = 0.0 if is_last or not self._checkpointer.is_due(step) else self._save()
        written = self._checkpointer.metrics()
        return Metrics({"time/checkpoint_s": Sum(export_s + save_s), **written, **evaluation})

    def _save(self, *, with_row: bool = False, is_finished: bool = False) -> float:
        """Begin to write a checkpoint; return the seconds the run had to pause.

        `with_row` keeps the metrics of a step that is interrupted before they are logged.
        """
        collector = self._collector.save()
        state = {
            **self._progress.save(with_row=with_row),
            "prompts": self._parts.save_prompts(),
            "collector": collector,
            "updates": self._updates.save(),
            "rewards": self._parts.outside.save(),
            "wandb_id": self._tracker.wandb_id,
            "base": self._parts.model,
        }
        about = {"is_finished": is_finished, "ledger": collector["ledger"]}
        with self._tracker.phase("copying the checkpoint"):
            return self._checkpointer.start(self._progress.version, state, about=about)

    def _restore(self, resumed: Resumed, view: View) -> None:
        """Continue from a checkpoint. Raise RunError for settings that do not fit it."""
        state = resumed.state
        self._progress = Progress.restore(state)
        self._collector.restore(state["collector"])
        self._updates.restore(state["updates"])
        with view.phase("restoring the checkpoint"):
            self._workers.load_state(resumed.path.resolve() / LEARNER)
        with view.phase("weight sync"):
            self._workers.sync_weights(self._progress.version)

    def _evaluate(self) -> Metrics:
        # Training and evaluation share these counters: take out training's counts first.
        self._collector.settle_scores(self._look)
        self._progress.counted = merge([self._progress.counted, self._parts.outside.metrics()])
        metrics = self._parts.evaluate(
            tracker=self._tracker,
            policy_version=self._progress.version,
            show=self._show,
        )
        self._progress.evaluated = self._progress.version
        self._checkpointer.note_evaluation(self._progress.version, metrics)
        return metrics

    def _export(self) -> None:
        """Write the policy as a Hugging Face folder, once for each version."""
        if self._progress.exported == self._progress.version:
            return
        path = export_path(self._run_dir.resolve(), self._progress.version)
        with self._tracker.phase("exporting the policy"):
            self._workers.export(path)
        self._progress.exported = self._progress.version
        self._tracker.message(f"policy: {path}")

    def _try_to_export(self) -> None:
        """Export with `_export`; when the disk fails, report it and continue."""
        try:
            self._export()
        except ExportError as error:
            self._tracker.message(f"{error}; training continues")

    def _keep_leftovers(self) -> None:
        """Write generated samples that were not trained, even when the run ends with an error."""
        leftovers = self._collector.leftovers(under_way=self._under_way)
        if leftovers and not self._is_saved:
            self._tracker.message(leftovers.keep(self._run_dir / "samples" / "leftover.jsonl"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:  # noqa: ANN401 - what ExitStack takes
        """Write samples that were not trained, end every process and close every file."""
        self._exits.callback(self._interrupts.arm)
        self._exits.callback(self._keep_leftovers)  # before the tracker is closed
        self._interrupts.disarm()
        self._exits.__exit__(*raised)

    def _show(self, phase: ProgressPhase, count: int, tokens_per_s: float | None = None) -> None:
        """Show progress, and stop here if requested."""
        self._look()
        phase.advance(count, "" if tokens_per_s is None else f"{tokens_per_s:,.0f} tokens/s")

    def _look(self) -> None:
        """Stop here if that was requested, but a `deterministic` run only between steps."""
        if not self._config.deterministic:
            self._interrupts.check()
