"""Logs all metrics: terminal, metrics.jsonl, trackers, samples. Stages only return them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

import yaml
from rich.console import Console

from april_rl.config.schema import TrackingConfig
from april_rl.errors import RunError
from april_rl.metrics import Metrics
from april_rl.run.tracking import figures
from april_rl.run.tracking.backends import BackendSettings, check_installed, start_backends
from april_rl.run.tracking.labels import RunLabels
from april_rl.run.tracking.metrics_file import Axes, MetricsFile
from april_rl.run.tracking.samples_file import (
    EvaluationRecord,
    SampleRecord,
    write_evaluation,
    write_samples,
    write_timeline,
)
from april_rl.run.tracking.signal_watch import NUM_SILENT, SignalWatch
from april_rl.run.tracking.terminal import ProgressPhase, View, can_redraw

METRICS_FILE = "metrics.jsonl"
_SHOW_SAMPLES_EVERY = 20  # steps


class RunDirectoryError(RunError):
    """The run directory cannot be created or written."""


class EndedPhase(NamedTuple):
    """A phase, and its times of the Unix clock."""

    name: str
    began_ns: int
    ended_ns: int


class Tracker:
    """Shows a run, records it in its directory, and sends the metrics to `tracking.backends`."""

    def __init__(
        self,
        *,
        run_dir: Path,
        config: Mapping[str, object],
        tracking: TrackingConfig,
        num_steps: int,
        advantage: str,
        labels: RunLabels,
        view: View,
        first_step: int | None = None,
        wandb_id: str = "",
    ) -> None:
        """Create the run directory, and start the trackers, which get `labels`; `config` is plain
        data. A resumed run continues its files from `first_step` on, and the W&B run `wandb_id`:
        later rows and samples are removed, because it makes them again. Raise RunDirectoryError
        when the directory cannot be written or holds a run, RunError when a tracker is not
        installed.
        """
        check_installed([backend.value for backend in tracking.backends])
        self._run_dir = run_dir
        self._save_samples_every = tracking.save_samples_every
        self._num_steps = num_steps
        self._tracking_s = 0.0  # seconds since the last row
        self._has_begun = False
        self.phases = deque[EndedPhase](maxlen=100)  # the last ended phases
        with self._writing():
            run_dir.mkdir(parents=True, exist_ok=True)
            if first_step is None:
                check_unused(run_dir)
            self._metrics_file = MetricsFile(run_dir / METRICS_FILE, first_step=first_step)
            if first_step is not None:
                forget_steps(run_dir, first_step)
            (run_dir / "config.yaml").write_text(config_text(config), encoding="utf-8")
        self._has_begun = True
        self._axes = Axes(self._metrics_file.last_row)
        self._signal, self._has_told_silence = SignalWatch(advantage), False
        self._view = view
        view.message(f"run directory: {run_dir}")
        settings = BackendSettings(
            tracking=tracking,
            labels=labels,
            run_dir=run_dir.resolve(),
            config=config,
            wandb_id=wandb_id,
            first_step=first_step,
        )
        self._backends = start_backends(settings, tell=view.message)

    @property
    def wandb_id(self) -> str:
        return self._backends.wandb_id

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[ProgressPhase]:
        """Show the phase while the context is open; `total` None: its end is unknown."""
        began_ns = time.time_ns()
        with self._view.phase(name, total) as phase:
            yield phase
        self.phases.append(EndedPhase(name, began_ns, time.time_ns()))

    def log(self, step: int, metrics: Metrics) -> Mapping[str, float]:
        """Record the metrics of a step, and return the row of the metrics file. Raise ValueError
        for a key that is not stage/quantity, RunDirectoryError for the disk.
        """
        values = metrics.read()
        values |= self._axes.advance(values) | {"time/tracking_s": self._tracking_s}
        self._tracking_s = 0.0
        with self._count_time():
            with self._writing():
                self._metrics_file.append(step, values)
            self._show(step, values, metrics)
        self._watch_signal(step, values.get("reward/no_signal_frac"))
        return values

    def _watch_signal(self, step: int, no_signal_frac: float | None) -> None:
        """Say once, below the step's line, when several steps in a row had no signal."""
        if no_signal_frac is None:
            return
        self._signal.add(step, no_signal_frac)
        if self._signal.num_steps == NUM_SILENT and not self._has_told_silence:
            self._has_told_silence = True
            self._view.message(self._signal.advice)

    def amend(self, step: int, metrics: Metrics) -> None:
        """Add metrics to the row of the last step, such as an evaluation; raise as `log` does,
        and ValueError for a metric that the row has already.
        """
        values = metrics.read()
        with self._count_time():
            with self._writing():
                self._metrics_file.amend(step, values)
            self._show(step, values, metrics)

    def _show(self, step: int, values: Mapping[str, float], metrics: Metrics) -> None:
        self._backends.log(step, values, metrics.histograms(), is_repeated=self._is_repeated(step))
        self._view.step(step, values)

    def _is_repeated(self, step: int) -> bool:
        return step <= self._metrics_file.forgotten_step

    def wants_samples(self, step: int) -> bool:
        """Return whether samples of this step are written or shown; else no texts are made."""
        return self._saves_samples(step) or self._shows_samples(step)

    def _shows_samples(self, step: int) -> bool:
        return self._save_samples_every is not None and step % _SHOW_SAMPLES_EVERY == 0

    def _saves_samples(self, step: int) -> bool:
        """Return whether the samples of `step` are saved; if any are, the first and last."""
        every = self._save_samples_every
        return every is not None and (step % every == 0 or step in (1, self._num_steps))

    def samples(
        self,
        step: int,
        records: Sequence[SampleRecord],
        timeline: Mapping[str, object] | None = None,
    ) -> None:
        """Write all samples of the step and its timeline, and show a few, each if it is due."""
        if self._saves_samples(step):
            with self._count_time(), self._writing():
                write_samples(self._run_dir / "samples", step, records)
                if timeline is not None:
                    write_timeline(self._run_dir / "timeline", step, timeline)
            with self._count_time():
                self._backends.samples(step, records, is_repeated=self._is_repeated(step))
        if self._shows_samples(step):
            self._view.samples(step, figures.telling(records))

    def evaluation(self, step: int, name: str, records: Iterable[EvaluationRecord]) -> None:
        """Write every sample of a held-out set, unless samples are never saved."""
        if self._save_samples_every is not None:
            with self._writing():
                path = self._run_dir / "samples" / f"eval_{name}_step_{step}.jsonl"
                write_evaluation(path, records)

    def message(self, text: str) -> None:
        self._view.message(text)

    def close(self, error: BaseException | None = None) -> None:
        """End view, file and trackers within seconds; `error` ended the run early."""
        self._view.close()
        self._metrics_file.close()
        self._backends.finish(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.close(error)

    @contextmanager
    def _count_time(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._tracking_s += time.perf_counter() - started

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an error of the disk into one message, with a remedy before the run begins."""
        try:
            yield
        except OSError as error:
            where = f": {error.filename}" if error.filename else ""
            remedy = "; give a folder you can write to with hydra.run.dir=FOLDER"
            raise RunDirectoryError(
                f"the run directory {self._run_dir} cannot be written "
                f"({error.strerror}{where}){'' if self._has_begun else remedy}"
            ) from error


def config_text(config: Mapping[str, object]) -> str:
    return str(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))


def check_unused(run_dir: Path) -> None:
    """Raise RunDirectoryError when another run has left its metrics in `run_dir`."""
    path = run_dir / METRICS_FILE
    if path.exists():
        raise RunDirectoryError(
            f"hydra.run.dir={run_dir} already holds a run ({path.name}); give another folder, or "
            "continue it with resume=auto"
        )


def forget_steps(run_dir: Path, first_step: int) -> None:
    """Remove samples and timelines from `first_step` on, which were not saved or are abandoned."""
    for folder in ("samples", "timeline"):
        for path in (run_dir / folder).glob("*step_*.json*"):
            if int(path.name.rpartition("step_")[2].partition(".")[0]) >= first_step:
                path.unlink()


def open_view(*, title: str, num_steps: int, has_panel: bool | None = None) -> View:
    """Return a view; None: with a panel on a terminal that can move its cursor."""
    console = Console()
    has_panel = can_redraw(console) if has_panel is None else has_panel
    return View(title=title, num_steps=num_steps, terminal=console if has_panel else None)
