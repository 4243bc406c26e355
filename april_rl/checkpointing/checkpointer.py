"""When a run is saved, and how: training stops for copies in memory only, and files are written
while the next rollout runs.

    start:  workers copy masters and moments to the host ──▶ threads write and sync their files
            the controller's state, as plain data        ──▶ a thread writes it
    poll:   all have ended: hashes into the manifest, rename, `latest`, and old checkpoints go
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from safetensors import SafetensorError

from april_rl.checkpointing.columns import Plain, write_state
from april_rl.checkpointing.folder import SCORE, begin, commit, discard, latest, prune
from april_rl.checkpointing.manifest import CheckpointError, FileRecord
from april_rl.config.checkpoint import CheckpointConfig
from april_rl.metrics import Metrics, Sum

STATE, LEARNER, CONFIG = "run", "learner", "config.yaml"  # names in the folder
_PATIENCE_S = 1.0  # waiting for the disk longer than this is said
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What the workers have written."""

    records: Mapping[str, FileRecord]  # by path within the folder they were given
    error: str = ""  # why they could not, with the file's name


class Savers(Protocol):
    """The workers, as far as checkpoints concern them."""

    def start_saving(self, folder: Path) -> None:
        """Copy every learner's state, and begin to write it into `folder`."""

    def saved(self) -> Written | None:
        """Return what was written; None while some worker is still writing. Never waits."""


class _UnderWay(NamedTuple):
    """A checkpoint that is being written."""

    step: int
    partial: Path
    about: Mapping[str, Any]
    started: float
    thread: threading.Thread  # writes the controller's part
    errors: list[str]  # of the thread


class Checkpointer:
    """Writes the checkpoints of a run into `root`, one at a time."""

    def __init__(
        self,
        root: Path,
        config: CheckpointConfig,
        *,
        workers: Savers,
        config_text: str,
        about: Mapping[str, Any],
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`config_text` is the resolved configuration, which every checkpoint shows; `about` is for
        people who look at the manifest; `tell` gets one line for each checkpoint, and for each one
        that fails.
        """
        self._root, self._config, self._workers = root, config, workers
        self._config_text, self._about = config_text, dict(about)
        self._tell, self._clock = tell, clock
        self._under_way: _UnderWay | None = None
        self._last_s = clock()  # when one was begun last
        self._has_failed = False  # the last one
        self._metrics = Metrics()
        self._scored_step, self._score = -1, 0.0

    def evaluated(self, step: int, metrics: Metrics) -> None:
        """Remember how good the policy of `step` is, if the best checkpoints are kept."""
        if self._config.best_metric in metrics:
            self._scored_step, self._score = step, metrics.number(self._config.best_metric)

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint should be written after `step`."""
        config = self._config
        by_steps = config.every_steps > 0 and step % config.every_steps == 0
        passed_s = self._clock() - self._last_s
        return by_steps or 0 < 60 * config.every_minutes <= passed_s

    def start(self, step: int, state: Plain, *, about: Mapping[str, Any]) -> float:
        """Begin to write the checkpoint of `step`, after the one before has ended; returns the
        seconds for which the run had to stop. `about` adds to what the manifest says.

        A disk that refuses is told, and the run goes on.
        """
        started = self._clock()
        self.finish()
        waited_s = self._clock() - started
        if waited_s > _PATIENCE_S:
            self._tell(
                f"checkpoint: waited {waited_s:.1f} s for the disk to take the one before; "
                "raise checkpoint.every_steps or checkpoint.every_minutes"
            )
        self._last_s, self._has_failed = started, False
        try:
            partial = begin(self._root, step)
            (partial / CONFIG).write_text(self._config_text, encoding="utf-8")
        except OSError as error:
            self._fail(step, str(error))
            return self._clock() - started
        self._workers.start_saving(partial / LEARNER)
        errors: list[str] = []
        thread = threading.Thread(
            target=_write, args=(state, partial, errors), name="checkpoint", daemon=True
        )
        thread.start()
        score = {SCORE: self._score} if step == self._scored_step else {}
        self._under_way = _UnderWay(
            step, partial, {**self._about, **about, **score}, started, thread, errors
        )
        return self._clock() - started

    def poll(self) -> None:
        """Finish the checkpoint under way if everything of it is written; never waits for it."""
        under_way = self._under_way
        if under_way is None or under_way.thread.is_alive():
            return
        written = self._workers.saved()
        if written is None:
            return
        self._under_way = None
        errors = [*under_way.errors, *([written.error] if written.error else [])]
        if not errors:
            errors = self._commit(under_way, written)
        if errors:
            discard(under_way.partial)
            self._fail(under_way.step, errors[0])

    def finish(self) -> bool:
        """Wait until the checkpoint under way is written; returns whether the last one was."""
        while self._under_way is not None:
            self.poll()
            if self._under_way is not None:
                time.sleep(_POLL_S)
        return not self._has_failed

    def metrics(self) -> Metrics:
        """Return `checkpoint/*` of what was written since the last call."""
        metrics, self._metrics = self._metrics, Metrics()
        return metrics

    def _commit(self, under_way: _UnderWay, written: Written) -> list[str]:
        """Make the checkpoint appear; returns why it could not."""
        config = self._config
        records = {f"{LEARNER}/{name}": of for name, of in written.records.items()}
        try:
            path = commit(
                under_way.partial, step=under_way.step, about=under_way.about, records=records
            )
            prune(self._root, keep_last=config.keep_last, keep_best=config.keep_best)
        except (OSError, CheckpointError) as error:
            return [str(error)]
        write_s = self._clock() - under_way.started
        num_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        self._metrics = Metrics(
            {"checkpoint/write_s": Sum(write_s), "checkpoint/bytes": Sum(num_bytes)}
        )
        self._tell(f"checkpoint: {path} ({num_bytes / 2**20:.1f} MiB in {write_s:.1f} s)")
        return []

    def _fail(self, step: int, reason: str) -> None:
        self._has_failed = True
        good = latest(self._root)
        kept = f"the last good one is {good}" if good else "there is no earlier one"
        self._tell(
            f"the checkpoint of step {step} could not be written ({reason}); training goes on, "
            f"and {kept}"
        )


def _write(state: Plain, partial: Path, errors: list[str]) -> None:
    """Write the controller's part, in a thread; adds to `errors` why it could not."""
    try:
        write_state(state, partial, STATE)
    except (OSError, SafetensorError) as error:
        errors.append(str(error))
