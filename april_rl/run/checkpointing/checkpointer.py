"""Decide when a run is saved, and save it: training pauses only to copy state in memory; files are
written during the next rollout.

    start:  workers copy weights and optimizer state to the host ──▶ threads write and fsync files
            the controller's state becomes plain data            ──▶ a thread writes it
    poll:   when all have finished: write hashes into the manifest, rename the folder, update
            `latest`, remove old checkpoints
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from april_rl.config.schema import CheckpointConfig
from april_rl.metrics import Metrics, Sum
from april_rl.run.checkpointing.columns import Plain, state_files, write_state
from april_rl.run.checkpointing.folder import SCORE, begin, commit, latest, prune
from april_rl.run.checkpointing.manifest import CheckpointError, FileRecord, record

STATE, LEARNER, CONFIG = "run", "learner", "config.yaml"  # names in a checkpoint's folder
_PATIENCE_S = 1.0  # if writing takes longer, the wait for the disk is reported
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The files that the workers have written, or the reason for a failure."""

    records: Mapping[str, FileRecord]  # by path within the folder passed to start_saving
    error: str = ""  # why writing failed, with the file's name; empty if it succeeded


class Savers(Protocol):
    """The workers' methods that checkpoints use."""

    def start_saving(self, folder: Path) -> Collection[str]:
        """Copy every learner's state and begin to write it; return the names of the files."""

    def poll_save(self) -> Written | None:
        """Return the written files, or None while a worker is still writing. Never waits."""


class _UnderWay(NamedTuple):
    """A checkpoint that is being written."""

    step: int
    partial: Path
    about: Mapping[str, Any]
    started: float
    required: frozenset[str]  # no run can resume from a checkpoint without these files
    state: BackgroundWrite  # writes the controller's state


class Checkpointer:
    """Writes the checkpoints of a run into the folder `root`, one at a time."""

    def __init__(
        self,
        root: Path,
        config: CheckpointConfig,
        *,
        workers: Savers,
        config_text: str,
        about: Mapping[str, Any],
        tell: Callable[[str], None],
        resumed: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`config_text` is saved in every checkpoint, and `about`, facts for readers, in its
        manifest. `tell` gets a line for each checkpoint, including those that fail. `resumed` is
        the one that the run resumes from.
        """
        self._root, self._config, self._workers = root, config, workers
        self._config_text, self._about = config_text, dict(about)
        self._tell, self._clock = tell, clock
        self.last = resumed  # the checkpoint that was written last, or else the resumed one
        self._under_way: _UnderWay | None = None
        self._last_s = clock()  # when the last checkpoint was started
        self._has_failed = False  # whether the last checkpoint failed
        self._metrics = Metrics()
        self._scored_step, self._score = -1, 0.0

    def note_evaluation(self, step: int, metrics: Metrics) -> None:
        """Remember the value of `checkpoint.best_metric` at `step` if `metrics` has it."""
        metric = self._config.best_metric
        if metric is not None and metric in metrics:
            self._scored_step, self._score = step, metrics.number(metric)

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint should be written after `step`."""
        steps, minutes = self._config.every_steps, self._config.every_minutes
        if steps is not None and step % steps == 0:
            return True
        return minutes is not None and self._clock() - self._last_s >= 60 * minutes

    def start(self, step: int, state: Plain, *, about: Mapping[str, Any]) -> float:
        """Start writing the checkpoint of `step` once the previous one is written; return the
        seconds for which training paused. If the disk fails, `tell` is called.
        """
        started = self._clock()
        self.finish()
        waited_s = self._clock() - started
        if waited_s > _PATIENCE_S:
            self._tell(
                f"checkpoint: waited {waited_s:.1f} s until the previous checkpoint was on disk; "
                "raise checkpoint.every_steps or checkpoint.every_minutes"
            )
        self._last_s, self._has_failed = started, False

        def write_controller(folder: Path) -> Sequence[Path]:
            write_state(state, folder, STATE)
            return ()  # `commit` syncs and hashes these files

        try:
            partial = begin(self._root, step)
            (partial / CONFIG).write_text(self._config_text, encoding="utf-8")
        except OSError as error:
            self._fail(step, str(error))
            return self._clock() - started
        learner = self._workers.start_saving(partial / LEARNER)
        required = {CONFIG, *state_files(STATE), *(f"{LEARNER}/{name}" for name in learner)}
        score = {SCORE: self._score} if step == self._scored_step else {}
        self._under_way = _UnderWay(
            step,
            partial,
            {**self._about, **about, **score},
            started,
            frozenset(required),
            BackgroundWrite(write_controller, partial),
        )
        return self._clock() - started

    def poll(self) -> None:
        """Finish the checkpoint in progress if all its files are written; never waits."""
        under_way = self._under_way
        if under_way is None or (state := under_way.state.outcome()) is None:
            return
        written = self._workers.poll_save()
        if written is None:
            return
        self._under_way = None
        if error := state.error or written.error or self._commit(under_way, written):
            shutil.rmtree(under_way.partial, ignore_errors=True)
            self._fail(under_way.step, error)

    def finish(self) -> bool:
        """Wait for the checkpoint in progress; return whether the last one succeeded."""
        while self._under_way is not None:
            self.poll()
            if self._under_way is not None:
                time.sleep(_POLL_S)
        return not self._has_failed

    def metrics(self) -> Metrics:
        """Return `checkpoint/*` of the checkpoint finished since the last call."""
        metrics, self._metrics = self._metrics, Metrics()
        return metrics

    def _commit(self, under_way: _UnderWay, written: Written) -> str:
        """Return why the checkpoint could not be written; empty if it was."""
        config = self._config
        records = {f"{LEARNER}/{name}": of for name, of in written.records.items()}
        try:
            path = commit(
                under_way.partial,
                step=under_way.step,
                about=under_way.about,
                records=records,
                required=under_way.required,
            )
            self.last = path
            prune(self._root, keep_last=config.keep_last, keep_best=int(bool(config.best_metric)))
        except (OSError, CheckpointError) as error:
            return str(error) or repr(error)
        write_s = self._clock() - under_way.started
        num_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        self._metrics = Metrics(
            {"checkpoint/write_s": Sum(write_s), "checkpoint/bytes": Sum(num_bytes)}
        )
        self._tell(f"checkpoint: {path} ({num_bytes / 2**20:.1f} MiB in {write_s:.1f} s)")
        return ""

    def _fail(self, step: int, reason: str) -> None:
        self._has_failed = True
        good = latest(self._root)
        kept = f"the last good one is {good}" if good else "there is no earlier one"
        self._tell(
            f"the checkpoint of step {step} could not be written ({reason}); training continues, "
            f"and {kept}"
        )


class BackgroundWrite:
    """The controller's or a worker's part of a checkpoint, which a thread writes."""

    def __init__(self, write: Callable[[Path], Sequence[Path]], folder: Path) -> None:
        """Begin. `write` returns files that it has written and synced, to be hashed here."""
        self._folder = folder
        self._records: dict[str, FileRecord] = {}
        self._error = ""
        # Keep no reference to `write`: the next checkpoint takes as much memory again.
        self._thread = threading.Thread(
            target=self._run, args=(write,), name="checkpoint", daemon=True
        )
        self._thread.start()

    def outcome(self) -> Written | None:
        """Return the written files or the failure; None while writing continues."""
        if self._thread.is_alive():
            return None
        return Written(records=self._records, error=self._error)

    def _run(self, write: Callable[[Path], Sequence[Path]]) -> None:
        try:
            for path in write(self._folder):
                self._records[path.relative_to(self._folder).as_posix()] = record(path)
        except Exception as error:  # after any error the checkpoint is incomplete
            self._error = str(error) or repr(error)  # never empty
