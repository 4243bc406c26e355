"""The charts of a run as Vega-Lite specifications, which the browser draws."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from statistics import fmean

from april_rl.lab.report.learning_charts import CRITIC, MISMATCH, TEACHER, evaluation, reward
from april_rl.lab.report.run_files import Row, RunFiles
from april_rl.lab.report.vega import (
    LOG,
    SHARE,
    STEP,
    Chart,
    Lines,
    Spec,
    age_scale,
    axis,
    base,
    legend,
)

# Steps in a chart; a longer run is drawn as means over equal numbers of steps.
MAX_POINTS, MAX_BARS = 200, 60
_MAX_LENGTHS = 5000  # samples in the histogram

# Parts of a step in order; the remainder is packing and transfers.
PHASES = (
    ("generation", "time/rollout_s"),
    ("waiting for rewards", "time/score_s"),
    ("abort and park", "rollout/stop_s"),
    ("update", "time/update_s"),
    ("weight sync", "time/weight_sync_s"),
)
REST = "packing and transfers"
_TOTALS = ("opened", "trained", "rejected", "dropped")  # counts of the ledger since the run began
_LENGTHS = Lines(
    id="lengths",
    title="Response lengths and their tail",
    caption="Tokens of the responses of each trained batch. The distance between p50 and max "
    "is what a synchronous step waits for.",
    keys={name: f"rollout/response_tokens_{name}" for name in ("max", "p99", "p95", "p50", "mean")},
    unit="tokens",
    scale=LOG,
)
_OCCUPANCY = Lines(
    id="occupancy",
    title="Engine occupancy",
    caption="Share of the slots that compute a request, over the whole time of a rollout, and "
    "the largest share of the KV cache that was in use. Slots are empty while rewards are "
    "awaited and while the step stops.",
    keys={"slots in use": "rollout/occupancy", "KV cache, at most": "rollout/kv_cache_frac"},
    unit="share",
    scale=SHARE,
)
_REWORK = Lines(
    id="rework",
    title="KV cache: parked, computed again, preempted",
    caption="Parked tokens wait for the next step; unless rollout.resume=keep they are "
    "prefilled again there. Preemption means that the KV cache is too small for the slots.",
    keys={
        "tokens parked in the buffer": "rollout/parked_tokens",
        "tokens computed again on resume": "rollout/reprefill_tokens",
        "tokens lost to preemption": "rollout/preempted_tokens",
    },
    unit="tokens",
)


def charts(run: RunFiles) -> list[Chart]:
    """Return the charts that the run has data for."""
    steps = average(run.steps, limit=MAX_POINTS)
    found = (
        reward(steps),
        evaluation(run),
        _time(run.steps),
        _LENGTHS.chart(steps),
        _length_histogram(run),
        _ages(steps),
        _ledger(average(_flows(run.steps), limit=MAX_POINTS)),
        *(each.chart(steps) for each in (_OCCUPANCY, _REWORK, TEACHER, CRITIC, MISMATCH)),
    )
    return [chart for chart in found if chart is not None]


def average(rows: Sequence[Row], *, limit: int) -> Sequence[Row]:
    """Return at most `limit` rows: each is the mean of equally many neighbours, with the number
    of the last step in it.
    """
    size = -(-len(rows) // limit)
    if size <= 1:
        return rows
    blocks = [rows[begin : begin + size] for begin in range(0, len(rows), size)]
    return [{**_means(block), "step": block[-1]["step"]} for block in blocks]


def _means(rows: Sequence[Row]) -> dict[str, float | None]:
    """Return the mean of every key over the rows that have it."""
    found = defaultdict[str, list[float]](list)
    for key, value in chain.from_iterable(row.items() for row in rows):
        if value is not None:
            found[key].append(value)
    return {key: fmean(values) for key, values in found.items()}


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
    size = -(-len(steps) // MAX_BARS)
    of_bars = f" Each bar is the mean of {size} steps." if size > 1 else ""
    values = [
        {"step": row["step"], "phase": name, "seconds": seconds, "order": names.index(name)}
        for row in average(steps, limit=MAX_BARS)
        for name, seconds in phase_seconds(row).items()
    ]
    return Chart(
        id="time",
        title="Where the time of a step goes",
        caption="Seconds of each phase. They add up to the step; evaluations and checkpoints come "
        f"between steps and are not in it.{of_bars}",
        spec=base(
            values,
            mark={"type": "bar", "tooltip": True},
            encoding={
                "x": axis("step", "step", "ordinal", axis={"labelAngle": 0, "labelOverlap": True}),
                "y": axis("seconds", "seconds"),
                "color": axis("phase", "", "nominal", sort=names, legend=legend()),
                "order": {"field": "order"},
            },
        ),
    )


def _length_histogram(run: RunFiles) -> Chart | None:
    step, samples = run.samples
    values = [
        {
            "tokens": sample["num_tokens"],
            "pieces": "in one step" if len(dict(sample["ages"])) < 2 else "over several steps",
        }
        for sample in samples[:_MAX_LENGTHS]
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
        {"step": row["step"], "age": f"age {found[1]}", "order": int(found[1]), "share": value}
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
                "order": {"field": "order"},
            },
        ),
    )


def _flows(steps: Sequence[Row]) -> list[Row]:
    """Return the groups opened, trained and lost in each step, and those in the buffer at its end.
    The ledger's own counts are totals since the beginning of the run.
    """
    totals = {f"{name} in the step": f"ledger/{name}" for name in _TOTALS}
    stocks = {f"{name} at its end": f"ledger/{name}" for name in ("parked", "ready")}
    rows: list[Row] = []
    before: Row = {}  # a run that was resumed in another folder lacks the row before its first
    for row in steps:
        is_known = row["step"] == 1 or before
        flows = {
            name: (row.get(key) or 0.0) - (before.get(key) or 0.0)
            for name, key in totals.items()
            if is_known
        }
        rows.append(
            {"step": row["step"], **flows, **{n: row.get(key) for n, key in stocks.items()}}
        )
        before = row
    return rows


def _ledger(flows: Sequence[Row]) -> Chart | None:
    names = sorted({name for row in flows for name, groups in row.items() if groups} - {"step"})
    return Lines(
        id="ledger",
        title="Flow of groups",
        caption="Groups that were opened and trained in each step, and those that wait in the "
        "buffer at its end, parked (unfinished) or ready.",
        keys={name: name for name in names},
        unit="groups",
    ).chart(flows)
