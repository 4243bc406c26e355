"""The charts of a run as Vega-Lite specifications, which the browser draws."""

from __future__ import annotations

import re
from collections.abc import Sequence

from april_rl.report.learning_charts import evaluation, mismatch, reward
from april_rl.report.run_files import Row, RunFiles
from april_rl.report.vega import STEP, Chart, Spec, age_scale, axis, base, legend, lines, points

MAX_POINTS = 500  # steps in a chart; of a longer run every k-th

# Time of a step, in the order it passes. What is left of the step is packing and transfers.
PHASES = (
    ("generation", "time/rollout_s"),
    ("waiting for rewards", "time/score_s"),
    ("abort and park", "rollout/stop_s"),
    ("update", "time/update_s"),
    ("weight sync", "time/weight_sync_s"),
)
REST = "packing and transfers"


def charts(run: RunFiles) -> list[Chart]:
    """Return the charts that the run has data for."""
    steps = _thinned(run.steps)
    found = (
        reward(steps),
        evaluation(run),
        _time(steps),
        _lengths(steps),
        _length_histogram(run),
        _ages(steps),
        _ledger(steps),
        _occupancy(steps),
        _rework(steps),
        mismatch(steps),
    )
    return [chart for chart in found if chart is not None]


def _thinned(rows: Sequence[Row]) -> list[Row]:
    return list(rows[:: -(-len(rows) // MAX_POINTS) or 1])


def phase_seconds(row: Row) -> dict[str, float]:
    """Return the seconds of each phase of a step; they add up to its time."""
    found = {name: row.get(key) or 0.0 for name, key in PHASES}
    found["generation"] -= found["waiting for rewards"] + found["abort and park"]
    found[REST] = (row.get("time/step_s") or 0.0) - sum(found.values())
    return found


def _time(steps: Sequence[Row]) -> Chart | None:
    if not steps:
        return None
    names = [*(name for name, _ in PHASES), REST]
    values = [
        {"step": row["step"], "phase": name, "seconds": seconds, "order": names.index(name)}
        for row in steps
        for name, seconds in phase_seconds(row).items()
    ]
    return Chart(
        id="time",
        title="Where the time of a step goes",
        caption="Seconds of each phase. They add up to the step; evaluations and checkpoints come "
        "between steps and are not in it.",
        spec=base(
            values,
            mark={"type": "bar", "tooltip": True},
            encoding={
                "x": {**STEP, "bin": {"maxbins": 60}} if len(steps) > 60 else _bars(),
                "y": axis("seconds", "seconds", aggregate="mean" if len(steps) > 60 else "sum"),
                "color": axis("phase", "", "nominal", sort=names, legend=legend()),
                "order": {"field": "order"},
            },
        ),
    )


def _bars() -> Spec:
    """Return a step axis for bars."""
    return axis("step", "step", "ordinal", axis={"labelAngle": 0, "labelOverlap": True})


def _lengths(steps: Sequence[Row]) -> Chart | None:
    keys = {
        name: f"rollout/response_tokens_{name}" for name in ("max", "p99", "p95", "p50", "mean")
    }
    if not points(steps, keys):
        return None
    return Chart(
        id="lengths",
        title="Response lengths and their tail",
        caption="Tokens of the responses of each trained batch. The distance between p50 and max "
        "is what a synchronous step waits for.",
        spec=lines(steps, keys, title="tokens", log=True),
    )


def _length_histogram(run: RunFiles) -> Chart | None:
    step, samples = run.samples
    values = [
        {
            "tokens": sample["num_tokens"],
            "pieces": "in one step" if len(sample["ages"]) < 2 else "over several steps",
        }
        for sample in samples[: 10 * MAX_POINTS]
    ]
    if not values:
        return None
    return Chart(
        id="length-histogram",
        title=f"Response lengths in step {step}",
        caption="Responses over several steps were parked and resumed at least once.",
        spec=base(
            values,
            mark={"type": "bar", "tooltip": True},
            encoding={
                "x": axis("tokens", "response tokens", bin={"maxbins": 40}),
                "y": {"aggregate": "count", "type": "quantitative", "title": "samples"},
                "color": axis("pieces", "", "nominal", legend=legend()),
            },
        ),
    )


def _ages(steps: Sequence[Row]) -> Chart | None:
    pattern = re.compile(r"staleness/token_frac_age_(\d+)")
    values: list[Spec] = [
        {"step": row["step"], "age": f"age {found[1]}", "share": value}
        for row in steps
        for key, value in row.items()
        if (found := pattern.fullmatch(key)) and value is not None
    ]
    if not values:
        return None
    ages = sorted({v["age"] for v in values}, key=lambda name: int(name.split()[1]))
    return Chart(
        id="ages",
        title="Age of trained tokens",
        caption="Share of the trained tokens by age: how many steps old the policy was that "
        "sampled them. Age 0 is on-policy.",
        spec=base(
            values,
            mark={"type": "area", "tooltip": True},
            encoding={
                "x": STEP,
                "y": axis("share", "share of tokens", axis={"format": "%"}, stack="normalize"),
                "color": axis(
                    "age", "", "ordinal", sort=ages, scale=age_scale(ages), legend=legend(6)
                ),
                "order": {"field": "age"},
            },
        ),
    )


def _ledger(steps: Sequence[Row]) -> Chart | None:
    totals = ("opened", "trained", "rejected", "dropped")
    values: list[Spec] = []
    before = dict.fromkeys(totals, 0.0)
    for row in steps:
        now = {name: row.get(f"ledger/{name}") or 0.0 for name in totals}
        flow: dict[str, float] = {f"{name} in the step": now[name] - before[name] for name in now}
        flow |= {
            f"{name} at its end": row.get(f"ledger/{name}") or 0.0 for name in ("parked", "ready")
        }
        before = now
        values += [{"step": row["step"], "name": n, "groups": count} for n, count in flow.items()]
    shown = {v["name"] for v in values if v["groups"]}
    if not shown:
        return None
    return Chart(
        id="ledger",
        title="Flow of groups",
        caption="Groups that were opened and trained in each step, and those that wait in the "
        "buffer at its end, parked (unfinished) or ready.",
        spec=base(
            [v for v in values if v["name"] in shown],
            mark={"type": "line", "tooltip": True, "strokeWidth": 1.8},
            encoding={
                "x": STEP,
                "y": axis("groups", "groups"),
                "color": axis("name", "", "nominal", legend=legend(2)),
            },
        ),
    )


def _occupancy(steps: Sequence[Row]) -> Chart | None:
    if not points(steps, {"": "rollout/occupancy"}):
        return None
    spec = lines(steps, {"slots in use": "rollout/occupancy"}, title="share of slots")
    spec["encoding"]["y"] |= {"axis": {"format": "%"}, "scale": {"domain": [0, 1]}}
    return Chart(
        id="occupancy",
        title="Engine occupancy",
        caption="Share of the slots that compute a request, over the time of a rollout.",
        spec=spec,
    )


def _rework(steps: Sequence[Row]) -> Chart | None:
    keys = {
        "tokens parked in the buffer": "rollout/parked_tokens",
        "tokens computed again on resume": "rollout/reprefill_tokens",
        "tokens lost to preemption": "rollout/preempted_tokens",
    }
    if not points(steps, keys):
        return None
    return Chart(
        id="rework",
        title="KV cache: parked, computed again, preempted",
        caption="Parked tokens wait for the next step; unless rollout.resume=keep they are "
        "prefilled again there. Preemption means that the KV cache is too small for the slots.",
        spec=lines(steps, keys, title="tokens"),
    )
