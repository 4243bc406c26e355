"""The rollout of a step as a chart of slots over time, and as a Chrome trace for Perfetto."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

from april_rl.lab.report.vega import Spec, age_scale, axis, base, legend
from april_rl.training.rollout.measures.timeline import Bar, Stay, Timeline
from april_rl.training.rollout.record import Act

MAX_SLOTS = 192  # drawn at most; with more slots, every k-th one
_CANVAS_FROM = 1500  # number of bars from which a canvas is used; SVG is slow with more
_STATES = {  # the states and their colours
    "finished": "#2a9d5c",
    "acting": "#8a8f98",
    "parked": "#e0115f",
    "resumed": "#00a6b4",
}


def busy_frac(timeline: Timeline) -> float:
    """Return the share of slot time in which a request was computed."""
    busy_s = sum(bar.stay.ended_s - bar.begun_s for bar in timeline.bars())
    return busy_s / (sum(timeline.slots.values()) * timeline.time_s)


def timeline_spec(timeline: Timeline, *, until_s: float, height: int = 420) -> Spec:
    """Return the chart of a step; `until_s` ends the time axis, so that two charts can be
    compared.
    """
    every = -(-sum(timeline.slots.values()) // MAX_SLOTS)
    bars = [b._replace(slot=b.slot // every) for b in timeline.bars() if b.slot % every == 0]
    ages = [f"age {age}" for age in range(1 + max((b.stay.age for b in bars), default=0))]
    values = [_value(bar) for bar in bars]
    engines = len(timeline.slots)
    slot = f"slot, over {engines} engines" if engines > 1 else "slot"
    time = axis("begin", "seconds", scale={"domain": [0, until_s], "nice": False})
    y = axis("slot", slot, scale={"nice": False, "zero": True}, axis={"grid": False})
    bar = {
        "mark": {"type": "rect", "tooltip": {"content": "data"}},
        "encoding": {
            **_corners(time, y),
            "color": axis("age", "", "ordinal", scale=age_scale(ages), legend=legend(6)),
        },
    }
    num_rows = 1 + max((bar.slot for bar in bars), default=0)
    layers = [bar, _marks(bars, y, size=max(3.0, 0.8 * height / num_rows))]
    if timeline.acts:
        layers.append(_acts(timeline, y, every=every))
    spec = base(values, height=height, layer=layers)
    spec["resolve"] = {"scale": {"color": "independent"}}
    if len(values) > _CANVAS_FROM:
        spec["usermeta"] = {"renderer": "canvas"}
    return spec


def _marks(bars: Sequence[Bar], y: Spec, *, size: float) -> Spec:
    """Return the layer with marks where samples finish, act, are parked or resumed; `size` is the
    height of a mark in pixels.
    """
    marks = [
        {"at": round(at_s, 4), "middle": bar.slot + 0.45, "state": state}
        for bar in bars
        for at_s, state in (
            (bar.stay.ended_s, bar.stay.outcome),
            (bar.begun_s, "resumed" if bar.stay.is_resumed else ""),
        )
        if state
    ]
    found = [state for state in _STATES if any(mark["state"] == state for mark in marks)]
    scale = {"domain": found, "range": [_STATES[state] for state in found]}
    return {
        "data": {"values": marks},
        "mark": {"type": "tick", "orient": "vertical", "thickness": 2, "height": size},
        "encoding": {
            "x": axis("at", "seconds"),
            "y": {**y, "field": "middle"},
            "color": axis("state", "", "nominal", scale=scale, legend=legend()),
        },
    }


def _value(bar: Bar) -> dict[str, Any]:
    stay = bar.stay
    return {
        "slot": bar.slot,
        "below": bar.slot + 0.9,
        "begin": round(bar.begun_s, 4),
        "end": round(stay.ended_s, 4),
        "age": f"age {stay.age}",
        "outcome": stay.outcome,
        "sample": f"{stay.prompt_id}.{stay.sample}",
        "tokens": f"{stay.start} + {stay.tokens}",
        "engine": stay.engine,
    }


def _acts(timeline: Timeline, y: Spec, *, every: int) -> Spec:
    """Return the layer of the samples that wait for their environment, in rows above the slots."""
    top = sum(timeline.slots.values()) // every + 1
    values = [
        {
            "row": top + row // every,
            "below": top + 0.9 + row // every,
            "begin": round(act.begun_s, 4),
            "end": round(act.ended_s, 4),
            "sample": f"{act.prompt_id}.{act.sample}",
            "seconds": round(act.ended_s - act.begun_s, 4),
        }
        for act, row in act_rows(timeline.acts)
        if row % every == 0
    ]
    return {
        "data": {"values": values},
        "mark": {"type": "rect", "color": _STATES["acting"], "tooltip": {"content": "data"}},
        "encoding": _corners(axis("begin", "seconds"), {**y, "field": "row"}),
    }


def act_rows(acts: Sequence[Act]) -> Iterator[tuple[Act, int]]:
    """Yield every act, in the order they began, with a row, from 0, in which no two overlap."""
    free: list[tuple[float, int]] = []  # when each row becomes free
    for act in acts:
        is_free = bool(free) and free[0][0] <= act.begun_s
        row = heapq.heappop(free)[1] if is_free else len(free)
        heapq.heappush(free, (act.ended_s, row))
        yield act, row


def _corners(x: Spec, y: Spec) -> Spec:
    return {"x": x, "x2": {"field": "end"}, "y": y, "y2": {"field": "below"}}


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return the step in the Trace Event Format: a process for each engine with a thread for each
    slot, and one for samples that wait for their environment; times in microseconds.
    """
    outside = 1 + max(timeline.slots, default=0)
    names = {engine: f"engine {engine}" for engine in sorted(timeline.slots)}
    names |= {outside: "environments"} if timeline.acts else {}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        for pid, name in names.items()
    ]
    for bar in timeline.bars():
        stay = bar.stay
        event = _event(stay, bar.begun_s, cat=stay.outcome, pid=stay.engine, tid=bar.slot)
        event["args"] = {
            "age": stay.age,
            "tokens_before": stay.start,
            "tokens": stay.tokens,
            "is_resumed": stay.is_resumed,
            "sent_s": round(stay.sent_s, 4),
        }
        events.append(event)
    for act, row in act_rows(timeline.acts):
        event = _event(act, act.begun_s, cat="acting", pid=outside, tid=row)
        events.append({**event, "args": {"is_finished": act.is_finished}})
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _event(each: Stay | Act, begun_s: float, **place: object) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": f"prompt {each.prompt_id} sample {each.sample}",
        "ts": round(1e6 * begun_s),
        "dur": max(1, round(1e6 * (each.ended_s - begun_s))),
        **place,
    }
