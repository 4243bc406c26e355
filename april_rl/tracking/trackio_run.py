"""trackio: a local SQLite file that `trackio show` presents, without an account."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout

import trackio

from april_rl.metrics import Histogram
from april_rl.tracking.backends import SAMPLE_COLUMNS, BackendSettings
from april_rl.tracking.labels import versions


class TrackioRun:
    """A run in trackio's folder (TRACKIO_DIR), named by its overrides and its run directory."""

    id = ""  # found again by its name

    def __init__(self, settings: BackendSettings, *, tell: Callable[[str], None]) -> None:
        """Begin the run, or go on with that of the same run directory."""
        with redirect_stdout(io.StringIO()):
            self._run = trackio.init(
                settings.project,
                name=f"{settings.labels.name} ({settings.run_dir.name})",
                group=settings.labels.group or None,
                config={**settings.config, "versions": dict(versions())},
                resume="never" if settings.first_step is None else "allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        tell(f"trackio: look at the run with: trackio show --project {settings.project}")

    def log(
        self, step: int, values: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        """Record the metrics of a step."""
        drawn = {
            key: trackio.Histogram(np_histogram=histogram.pair())
            for key, histogram in histograms.items()
        }
        self._run.log({**values, **drawn}, step=step)

    def samples(self, step: int, rows: Sequence[Sequence[object]]) -> None:
        """Record a table of samples."""
        table = trackio.Table(columns=list(SAMPLE_COLUMNS), data=[list(row) for row in rows])
        self._run.log({"samples": table}, step=step)

    def finish(self, error: BaseException | None = None) -> None:  # noqa: ARG002
        """Write what is left."""
        with redirect_stdout(io.StringIO()):
            trackio.finish()  # type: ignore[no-untyped-call]
