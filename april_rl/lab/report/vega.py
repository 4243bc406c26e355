"""Vega-Lite specifications: the parts that all charts of a page share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    return {"field": field, "type": kind, "title": title, **rest}


def legend(columns: int = 3) -> Spec:
    """Return a legend below the chart, where it does not reduce the width."""
    return {"orient": "bottom", "title": None, "columns": columns, "labelLimit": 260}


STEP = axis("step", "step", axis={"tickMinStep": 1, "format": "d"})
# Scales of a vertical axis.
LINEAR = {"scale": {"zero": True}, "axis": {}}
LOG = {"scale": {"type": "log"}, "axis": {"tickCount": 4}}
SHARE = {"scale": {"domain": [0, 1]}, "axis": {"format": "%"}}


class Lines(NamedTuple):
    """A chart over the steps with a line for each metric, and a legend if there are several."""

    id: str
    title: str
    caption: str
    keys: Mapping[str, str]  # name → metric
    unit: str = ""
    scale: Spec = LINEAR

    def chart(self, steps: Sequence[Row], *, height: int = 220) -> Chart | None:
        """Return the chart of these steps; None if none of them has one of the metrics."""
        values: list[Spec] = [
            {"step": row["step"], "name": name, "value": value}
            for row in steps
            for name, key in self.keys.items()
            if (value := row.get(key)) is not None
        ]
        if not values:
            return None
        if self.scale is LOG:
            values = [point for point in values if point["value"] > 0]
        key = legend() if len(self.keys) > 1 else None
        spec = base(
            values,
            height=height,
            mark={"type": "line", "interpolate": "linear", "tooltip": True, "strokeWidth": 1.8},
            encoding={
                "x": STEP,
                "y": axis("value", self.unit, **self.scale),
                "color": axis("name", "", "nominal", sort=list(self.keys), legend=key),
            },
        )
        return Chart(id=self.id, title=self.title, caption=self.caption, spec=spec)


def age_scale(ages: Sequence[str]) -> Spec:
    """Return the colours of ages; the oldest ones share the last."""
    last = len(AGE_COLOURS) - 1
    return {"domain": list(ages), "range": [AGE_COLOURS[min(n, last)] for n in range(len(ages))]}
