"""Vega-Lite specifications: the parts that all charts of a page share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from april_rl.lab.report.run_files import Row

Spec = dict[str, Any]

AGE_COLOURS = ("#5b8fb9", "#e3b23c", "#e8833a", "#d1495b", "#a23b8f", "#6f4fb3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart of a page."""

    id: str  # id of the HTML element
    title: str
    caption: str  # what it shows, and how to read it
    spec: Spec


def base(values: Sequence[Mapping[str, Any]], *, height: int = 220, **rest: object) -> Spec:
    """Return a specification as wide as the page, with its data."""
    return {
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "data": {"values": list(values)},
        **rest,
    }


def axis(field: str, title: str, kind: str = "quantitative", **rest: object) -> Spec:
    """Return an axis for a field of the data."""
    return {"field": field, "type": kind, "title": title, **rest}


def legend(columns: int = 3) -> Spec:
    """Return a legend below the chart, where it does not reduce the width."""
    return {"orient": "bottom", "title": None, "columns": columns, "labelLimit": 260}


STEP = axis("step", "step", axis={"tickMinStep": 1, "format": "d"})


def points(steps: Sequence[Row], keys: Mapping[str, str]) -> list[Spec]:
    """Return {step, name, value} of each metric in `keys`, name → key."""
    return [
        {"step": row["step"], "name": name, "value": row[key]}
        for row in steps
        for name, key in keys.items()
        if row.get(key) is not None
    ]


def lines(
    steps: Sequence[Row],
    keys: Mapping[str, str],
    *,
    title: str,
    log: bool = False,
    height: int = 220,
) -> Spec:
    """Return a line for each metric in `keys`, with a legend if there are several."""
    values = points(steps, keys)
    if log:
        values = [point for point in values if point["value"] > 0]
    scale = {"type": "log"} if log else {"zero": True}
    grid = {"tickCount": 4} if log else {}
    return base(
        values,
        height=height,
        mark={"type": "line", "interpolate": "linear", "tooltip": True, "strokeWidth": 1.8},
        encoding={
            "x": STEP,
            "y": axis("value", title, scale=scale, axis=grid),
            "color": axis(
                "name", "", "nominal", sort=list(keys), legend=legend() if len(keys) > 1 else None
            ),
        },
    )


def line_chart(
    steps: Sequence[Row],
    keys: Mapping[str, str],
    *,
    id: str,
    title: str,
    caption: str,
    unit: str = "",
    log: bool = False,
    height: int = 220,
) -> Chart | None:
    """Return a chart with a line for each metric in `keys`; None if no step has one of them."""
    if not points(steps, keys):
        return None
    spec = lines(steps, keys, title=unit, log=log, height=height)
    return Chart(id=id, title=title, caption=caption, spec=spec)


def age_scale(ages: Sequence[str]) -> Spec:
    """Return the colours of ages; the oldest ones share the last."""
    last = len(AGE_COLOURS) - 1
    return {"domain": list(ages), "range": [AGE_COLOURS[min(n, last)] for n in range(len(ages))]}
