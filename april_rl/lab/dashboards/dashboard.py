"""W&B workspaces made from panels.py: one for runs, one for a sweep over α."""

from __future__ import annotations

import json
import re
from typing import Any

import wandb
import wandb_workspaces.reports.v2.interface as wr
import wandb_workspaces.workspaces as ws

from april_rl.errors import RunError
from april_rl.lab.dashboards.panels import SECTIONS, SWEPT, Panel

NAME, SWEEP_NAME = "april_rl", "april_rl sweep"
_COLUMNS, _ROWS = 3, 3
_SWEEP_PANELS = (
    "eval/held_out/avg_at_k",
    "reward/mean",
    "rollout/finished_samples_per_s",
    "throughput/trained_tokens_per_s",
    "staleness/off_policy_token_frac",
    "time/step_s",
)
_RANDOM = ("__id__", "id")  # drawn anew each time a workspace is made


class DashboardError(RunError):
    """W&B did not save a dashboard."""


def run_dashboard(*, entity: str, project: str) -> ws.Workspace:
    """Return the workspace with all sections, of which the first is open."""
    return _workspace(
        NAME,
        entity=entity,
        project=project,
        sections=[
            _section(section.name, [_line_plot(panel) for panel in section.panels], is_open=n == 0)
            for n, section in enumerate(SECTIONS)
        ],
    )


def sweep_dashboard(*, entity: str, project: str) -> ws.Workspace:
    """Return the workspace that compares runs by their over-sampling factor: the last value of a
    metric over α, and its course with one line per α, averaged over seeds.
    """
    x = wr.Config(SWEPT)
    last = [wr.ScatterPlot(title=key, x=x, y=wr.SummaryMetric(key)) for key in _SWEEP_PANELS]
    courses = [
        wr.LinePlot(title=key, x="step", y=[key], groupby=wr.Config(SWEPT), groupby_aggfunc="mean")
        for key in _SWEEP_PANELS
    ]
    sections = [_section("last value over α", last), _section("course by α", courses)]
    return _workspace(SWEEP_NAME, entity=entity, project=project, sections=sections)


def save(workspace: ws.Workspace) -> str:
    """Save the workspace as a new view on the W&B server and return its address. Raises
    DashboardError when there is no login, or the server refuses it.
    """
    try:
        workspace.save()  # type: ignore[no-untyped-call]
    except (wandb.errors.Error, ValueError, OSError) as error:
        raise DashboardError(
            f"W&B did not save the dashboard ({error}); log in with `wandb login`, and check "
            f"entity={workspace.entity} and project={workspace.project}"
        ) from error
    return str(workspace.url)


def plain(workspace: ws.Workspace) -> dict[str, Any]:
    """Return the workspace's spec as plain data, without the ids that are drawn at random."""
    spec = workspace._to_model().spec.model_dump_json(by_alias=True, exclude_none=True)
    kept: dict[str, Any] = json.loads(spec, object_hook=_without_ids)
    return kept


def _without_ids(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key not in _RANDOM}


def _workspace(name: str, *, entity: str, project: str, sections: list[ws.Section]) -> ws.Workspace:
    return ws.Workspace(
        name=name,
        entity=entity,
        project=project,
        sections=sections,
        settings=ws.WorkspaceSettings(x_axis="step"),
    )


def _section(name: str, panels: list[Any], *, is_open: bool = True) -> ws.Section:
    layout = ws.SectionLayoutSettings(columns=_COLUMNS, rows=_ROWS)
    return ws.Section(name=name, panels=panels, is_open=is_open, layout_settings=layout)


def _line_plot(panel: Panel) -> wr.LinePlot:
    if any("*" in key for key in panel.keys):
        regex = "|".join(map(_regex, panel.keys))
        return wr.LinePlot(title=panel.title, x=panel.axis, metric_regex=f"^({regex})$")
    return wr.LinePlot(title=panel.title, x=panel.axis, y=list(panel.keys))


def _regex(key: str) -> str:
    return re.escape(key).replace(r"\*", "[^/]+")
