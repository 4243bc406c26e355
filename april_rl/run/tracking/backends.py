"""Trackers other than metrics.jsonl: W&B, trackio, TensorBoard. Their failures never end a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Protocol

from april_rl.config.choices import TrackingBackend, WandbMode
from april_rl.config.schema import TrackingConfig
from april_rl.errors import RunError
from april_rl.metrics import Histogram
from april_rl.run.tracking.figures import ages_text
from april_rl.run.tracking.labels import RunLabels
from april_rl.run.tracking.samples_file import SampleRecord

Tell = Callable[[str], None]

SAMPLE_COLUMNS = (
    *("step", "prompt_id", "index", "prompt", "response", "ages", "num_tokens"),
    *("reward", "reward_parts", "advantage", "finish_reason", "source"),
)
_MAX_SAMPLES = 64  # samples in a table


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSettings:
    """Settings of the trackers of a run."""

    tracking: TrackingConfig
    labels: RunLabels
    run_dir: Path
    config: Mapping[str, object]
    wandb_id: str = ""  # the W&B run to continue
    first_step: int | None = None  # first step of a resumed run


class Backend(Protocol):
    """A tracker: records the metrics of steps, and tables of samples."""

    id: str  # a later process continues the run by this id; empty if the tracker needs none
    can_replace: bool  # whether a step that is sent again by a resumed run replaces the old one

    def log(
        self, step: int, values: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        """Record the metrics of a step."""

    def samples(self, step: int, rows: Sequence[Sequence[object]]) -> None:
        """Record a table with SAMPLE_COLUMNS."""

    def finish(self, error: BaseException | None = None) -> None:
        """End the record within seconds, also without a network; `error` ended the run."""


class LibraryRun:
    """A run of a library that makes histograms and tables as W&B does."""

    can_replace = False

    def __init__(
        self, library: ModuleType, record: Callable[[int, dict[str, object]], object]
    ) -> None:
        self._library, self._record = library, record

    def log(
        self, step: int, values: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        """Record the metrics of a step."""
        drawn = {
            key: self._library.Histogram(np_histogram=histogram.pair())
            for key, histogram in histograms.items()
        }
        self._record(step, {**values, **drawn})

    def samples(self, step: int, rows: Sequence[Sequence[object]]) -> None:
        """Record a table of samples."""
        table = self._library.Table(columns=list(SAMPLE_COLUMNS), data=[list(row) for row in rows])
        self._record(step, {"samples": table})


@dataclass(slots=True)
class Backends:
    """The trackers of a run. A tracker that fails is reported once and stops recording."""

    tell: Tell
    open: dict[str, Backend] = field(default_factory=dict)

    def start(self, name: str, build: Callable[[], Backend | None]) -> None:
        """Start a tracker; `build` returns None for one that is switched off."""
        with self._guard(name):
            backend = build()
            if backend is not None:
                self.open[name] = backend

    @property
    def wandb_id(self) -> str:
        """Return the id of the W&B run; empty when there is none."""
        wandb = self.open.get("wandb")
        return wandb.id if wandb is not None else ""

    def log(
        self,
        step: int,
        values: Mapping[str, float],
        histograms: Mapping[str, Histogram],
        *,
        is_repeated: bool = False,
    ) -> None:
        """Record a step's metrics; a repeated one goes to trackers that can replace it."""
        self._each(lambda backend: backend.log(step, values, histograms), is_repeated=is_repeated)

    def samples(
        self, step: int, records: Sequence[SampleRecord], *, is_repeated: bool = False
    ) -> None:
        """Record a table of the first samples, as `log` does metrics."""
        rows = [sample_row(step, record) for record in records[:_MAX_SAMPLES]]
        self._each(lambda backend: backend.samples(step, rows), is_repeated=is_repeated)

    def finish(self, error: BaseException | None = None) -> None:
        """End every tracker's record."""
        self._each(lambda backend: backend.finish(error))
        self.open.clear()

    def _each(self, call: Callable[[Backend], None], *, is_repeated: bool = False) -> None:
        for name, backend in list(self.open.items()):
            if is_repeated and not backend.can_replace:
                continue
            with self._guard(name):
                call(backend)

    @contextmanager
    def _guard(self, name: str) -> Iterator[None]:
        """Drop the tracker when its library raises anything, and report why."""
        try:
            yield
        except Exception as error:
            self.open.pop(name, None)
            reason = str(error).splitlines() or [""]
            self.tell(
                f"tracking.backends: {name} failed ({type(error).__name__}: {reason[0]}) and "
                "stops recording; the run continues, and metrics.jsonl has every step"
            )


def sample_row(step: int, record: SampleRecord) -> list[object]:
    """Return a sample as a row with SAMPLE_COLUMNS."""
    parts = ", ".join(f"{name} {value:g}" for name, value in record.reward_parts)
    ages = ages_text(record.ages)
    return [
        *(step, record.prompt_id, record.index, record.prompt, record.response, ages),
        *(record.num_tokens, float(record.reward), parts, record.advantage),
        *(str(record.finish_reason), record.source),
    ]


def check_installed(names: Sequence[str]) -> None:
    """Raise RunError for a tracker that is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise RunError(
                f"tracking.backends={list(names)} needs the package {name}, which is not "
                f"installed: pip install {name}, or leave it out"
            )


def start_backends(settings: BackendSettings, *, tell: Tell) -> Backends:
    """Return the trackers of a run, started."""
    backends = Backends(tell)
    for backend in settings.tracking.backends:
        backends.start(backend.value, partial(_start, backend, settings, tell))
    return backends


def _start(backend: TrackingBackend, settings: BackendSettings, tell: Tell) -> Backend | None:
    """Start a tracker; each imports its library, which takes seconds. None: W&B is disabled."""
    match backend:
        case TrackingBackend.wandb:
            if settings.tracking.wandb is WandbMode.disabled:
                return None
            from april_rl.run.tracking.wandb_run import start_wandb

            return start_wandb(settings, tell=tell)
        case TrackingBackend.trackio:
            from april_rl.run.tracking.trackio_run import TrackioRun

            return TrackioRun(settings, tell=tell)
        case TrackingBackend.tensorboard:
            from april_rl.run.tracking.tensorboard_run import TensorboardRun

            return TensorboardRun(settings)
