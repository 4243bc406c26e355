"""Two W&B workspaces: the first look at runs, and a sweep over α averaged over seeds.

A key with a `*` stands for all metrics of its family (april_rl/run/tracking/keys.py).
"""

from __future__ import annotations

import re
from typing import Any

import wandb
import wandb_workspaces.reports.v2.interface as wr
import wandb_workspaces.workspaces as ws

from april_rl.errors import RunError
from april_rl.run.tracking.keys import FIRST_LOOK, KEYS

RUN, SWEEP = "run", "sweep"
KINDS = (RUN, SWEEP)
SWEPT = "rollout.over_sampling_factor"  # the setting whose values the sweep's view compares
SWEEP_LOOK = (
    *("eval/*/avg_at_k", "reward/mean", "rollout/finished_samples_per_s"),
    *("throughput/trained_tokens_per_s", "staleness/off_policy_token_frac", "time/step_s"),
)
_UNITS = {key.key: key.unit for key in KEYS}
_COLUMNS, _ROWS = 3, 3
_BY_ALPHA: dict[str, Any] = {"groupby": wr.Config(SWEPT), "groupby_aggfunc": "mean"}
_ALONE: dict[str, Any] = {}


def dashboard(kind: str, *, entity: str, project: str) -> ws.Workspace:
    """Return the view of a kind in KINDS. Raise KeyError if a panel's metric is not logged."""
    is_sweep = kind == SWEEP
    # W&B groups its table of runs by α, and draws the mean of a group in every panel.
    grouping = ws.RunsetSettings(groupby=[ws.Config(SWEPT)] if is_sweep else [])
    return ws.Workspace(
        name="april_rl: sweep over α" if is_sweep else "april_rl: first look",
        entity=entity,
        project=project,
        sections=_sweep_sections() if is_sweep else [_section("first look", _lines(FIRST_LOOK))],
        settings=ws.WorkspaceSettings(x_axis="step"),
        runset_settings=grouping,
    )


def spec(view: ws.Workspace) -> str:
    """Return the view as the JSON text that W&B stores."""
    stored: str = view._to_model().spec.model_dump_json(by_alias=True, exclude_none=True)
    return stored


def save(view: ws.Workspace) -> str:
    """Save a new view on the W&B server and return its address. Raise RunError when there is
    no API key, or when the server refuses the view or does not answer.
    """
    try:
        # No prompt is allowed: a script would wait for an answer.
        if not wandb.login(prompt=False):
            raise RunError(
                "saving a dashboard needs an API key of W&B: run `wandb login` or set "
                "WANDB_API_KEY; --print needs none"
            )
        view.save()  # type: ignore[no-untyped-call]
    except (wandb.errors.Error, ValueError, OSError) as error:
        raise RunError(
            f"W&B did not save the dashboard ({error}); check the API key (`wandb login`), "
            f"entity={view.entity} and project={view.project}"
        ) from error
    return str(view.url)


def _sweep_sections() -> list[ws.Section]:
    # A bar needs the whole name of its metric, which a family of metrics does not have.
    single = [key for key in SWEEP_LOOK if "*" not in key]
    bars = [
        wr.BarPlot(title=key, metrics=[key], title_x=_UNITS[key], **_BY_ALPHA) for key in single
    ]
    return [
        _section("mean over seeds, by α", _lines(SWEEP_LOOK, grouping=_BY_ALPHA)),
        _section("last step, mean over seeds, by α", bars),
    ]


def _section(name: str, panels: list[Any]) -> ws.Section:
    layout = ws.SectionLayoutSettings(columns=_COLUMNS, rows=_ROWS)
    return ws.Section(name=name, panels=panels, is_open=True, layout_settings=layout)


def _lines(keys: tuple[str, ...], grouping: dict[str, Any] = _ALONE) -> list[wr.LinePlot]:
    """Return a panel for each metric, over the steps."""
    return [
        wr.LinePlot(title=key, x="step", title_y=_UNITS[key], **_metrics(key), **grouping)
        for key in keys
    ]


def _metrics(key: str) -> dict[str, Any]:
    if "*" not in key:
        return {"y": [key]}
    return {"metric_regex": f"^{re.escape(key)}$".replace(r"\*", "[^/]+")}
