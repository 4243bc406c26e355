"""trackio: a local SQLite file that `trackio show` presents, without an account."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from urllib.parse import quote

import trackio

from april_rl.run.tracking import keys
from april_rl.run.tracking.backends import BackendSettings, LibraryRun
from april_rl.run.tracking.labels import versions

_PAGE = "http://127.0.0.1:7860/"  # where `trackio show` serves its page


class TrackioRun(LibraryRun):
    """A run in trackio's folder (TRACKIO_DIR), named by its overrides and its run directory."""

    id = ""  # the run is found by its name

    def __init__(self, settings: BackendSettings, *, tell: Callable[[str], None]) -> None:
        project = settings.tracking.project
        with redirect_stdout(io.StringIO()):
            run = trackio.init(
                project,
                name=_name(settings),
                group=settings.labels.group or None,
                config={**settings.config, "versions": dict(versions())},
                resume="never" if settings.first_step is None else "allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        super().__init__(trackio, lambda step, row: run.log(row, step=step))
        tell(
            f"trackio: look at the run with: trackio show --project {project}, then open "
            f"{first_look(project, settings.config)}"
        )

    def finish(self, error: BaseException | None = None) -> None:  # noqa: ARG002
        """Write the remaining records."""
        with redirect_stdout(io.StringIO()):
            trackio.finish()  # type: ignore[no-untyped-call]


def _name(settings: BackendSettings) -> str:
    """Return the name of the run in trackio, which a resume with other settings keeps."""
    path = settings.run_dir / "trackio_name.txt"
    if settings.first_step is not None and path.is_file():
        return path.read_text(encoding="utf-8")
    name = f"{settings.labels.name} ({settings.run_dir.name})"
    path.write_text(name, encoding="utf-8")
    return name


def first_look(project: str, config: Mapping[str, object]) -> str:
    """Return the address of trackio's page with the panels of FIRST_LOOK alone."""
    evaluation = config.get("evaluation")
    sets = evaluation.get("sets", {}) if isinstance(evaluation, Mapping) else {}
    names = [name for name, chosen in sets.items() if chosen is not None]  # null leaves a set out
    shown = [
        key.replace("*", name)
        for key in keys.FIRST_LOOK
        for name in (names if "*" in key else ("",))
    ]
    return f"{_PAGE}?project={quote(project)}&metrics={quote(','.join(shown), safe='/,')}"
