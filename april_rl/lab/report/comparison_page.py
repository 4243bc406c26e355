"""A comparison as a page and as a text table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from textwrap import fill

from april_rl.lab.report import html
from april_rl.lab.report.compared_run import evaluations
from april_rl.lab.report.comparison import Cell, RunComparison
from april_rl.lab.report.vega import Chart, Spec, axis, base, legend


def comparison_table(comparison: RunComparison, *, width: int | None = None) -> str:
    """Return the comparison as text in columns. In a terminal of `width` characters, variants that
    do not fit beside the others follow below them.
    """
    labels, rows = [""], [list(comparison.variants)]
    for label, cells in comparison.rows():
        labels.append(label)
        rows.append([f"{cell.mean}  {cell.versus}".strip() for cell in cells])
    columns = [_right(column) for column in zip(*rows, strict=True)]
    first = [f"{label:<{max(map(len, labels))}}" for label in labels]
    lines = []
    while columns:
        table, *columns = [first, *columns]
        while columns and (table is first or width is None or _fits(table, columns[0], width)):
            table = ["  ".join(cells) for cells in zip(table, columns.pop(0), strict=True)]
        lines += [*table, ""]
    differences = [f"{head}: {text}" for head, text in comparison.differences.items()]
    notes = (*_warning(comparison), *differences, _explanation(comparison))
    notes = (*notes, *_omission_note(comparison))
    return "\n".join((*lines, *(note if width is None else fill(note, width) for note in notes)))


def _right(cells: Sequence[str]) -> list[str]:
    return [f"{cell:>{max(map(len, cells))}}" for cell in cells]


def _fits(table: Sequence[str], column: Sequence[str], width: int) -> bool:
    return len(table[0]) + 2 + len(column[0]) <= width


def _warning(comparison: RunComparison) -> list[str]:
    """Return the sentence that accuracies may not be comparable, if so."""
    settings = comparison.unlike_scores()
    if not settings:
        return []
    return [
        "Warning: these runs were scored by other rewards or on other data, so that their "
        f"accuracies may not mean the same: {'; '.join(settings)}."
    ]


def _explanation(comparison: RunComparison) -> str:
    budget = comparison.budget
    return (
        f"The accuracy is {budget.accuracy:.2f} on {budget.evaluation_set or 'no held-out set'}. "
        f"Equal samples are {budget.samples:,.0f}, equal time is {budget.seconds:,.1f} s of "
        "training steps, without evaluations and checkpoints. A mean is followed by the "
        f"comparison with {comparison.baseline} on equal seeds: a ratio or a difference, with its "
        "95 % interval where there is more than one seed."
    )


def _omission_note(comparison: RunComparison) -> list[str]:
    """Return the sentence that explains why ratios are omitted, if some are."""
    doubts = comparison.doubts()
    if not doubts:
        return []
    reasons = "; ".join(f"{reason} ({', '.join(names)})" for reason, names in doubts.items())
    return [
        f"Ratios to {comparison.baseline} are left out where chance alone may explain them: "
        f"{reasons}. Compare longer runs with several seeds, such as those of +sweep=alpha."
    ]


def comparison_page(comparison: RunComparison, planned: Sequence[str] = ()) -> str:
    """Return the page; `planned` says how far off a plan was."""
    return html.page("Comparison of runs", _body(comparison, planned))


def _body(comparison: RunComparison, planned: Sequence[str]) -> Iterator[str]:
    others = [variant for variant in comparison.variants if variant != comparison.baseline]
    title = " against ".join(filter(None, (comparison.baseline, ", ".join(others))))
    yield f"<header><h1>{escape(title)}</h1>"
    yield f"<p>{escape(_explanation(comparison))}</p></header><main>"
    for head, text in comparison.differences.items():
        yield f'<p class="soft">{escape(f"{head}: {text}")}</p>'
    yield html.advice([*_warning(comparison), *_omission_note(comparison), *planned])
    rows = ([escape(label), *map(_cell, cells)] for label, cells in comparison.rows())
    yield html.table(["", *comparison.variants], rows)
    for chart in _charts(comparison):
        yield html.chart_block(chart)
    yield "<section><h2>Runs</h2><ul>"
    for variant, runs in comparison.variants.items():
        for run in runs:
            place = f"{variant}, seed {run.setting('seed')}: {run.run_dir.resolve()}"
            yield f'<li class="soft">{escape(place)}</li>'
    yield "</ul></section></main>"


def _cell(cell: Cell) -> str:
    versus = f'<small class="soft">{escape(cell.versus)}</small>' if cell.versus else ""
    return f"{escape(cell.mean)}{versus}"


def _charts(comparison: RunComparison) -> Iterator[Chart]:
    values: list[Spec] = [
        {
            "variant": variant,
            "run": f"{variant}, seed {run.setting('seed')}",
            "seconds": round(each.seconds, 3),
            "samples": each.samples,
            "accuracy": each.accuracy,
        }
        for variant, runs in comparison.variants.items()
        for run in runs
        for each in evaluations(run, comparison.budget.evaluation_set)
    ]
    if values:
        for field, what in (("seconds", "seconds of training"), ("samples", "trained samples")):
            yield Chart(
                id=f"accuracy-{field}",
                title=f"Held-out accuracy over {what}",
                caption="A line for each run. The dashed line is the accuracy of the table.",
                spec=_curves(values, field, what, comparison),
            )
    yield Chart(
        id="step-seconds",
        title="Time of the steps",
        caption="How the seconds of a step are distributed over all steps of a variant: box from "
        "the first to the third quartile, whiskers from the shortest to the longest.",
        spec=_step_seconds(comparison),
    )


def _curves(values: list[Spec], field: str, title: str, comparison: RunComparison) -> Spec:
    y = axis("accuracy", "avg@k", scale={"zero": False})
    colour = axis("variant", "", "nominal", sort=list(comparison.variants), legend=legend())
    target = {"accuracy": comparison.budget.accuracy}
    return base(
        values,
        height=280,
        layer=[
            {
                "mark": {"type": "line", "point": True, "tooltip": True},
                "encoding": {
                    "x": axis(field, title),
                    "y": y,
                    "color": colour,
                    "detail": axis("run", "", "nominal"),
                },
            },
            {
                "data": {"values": [target]},
                "mark": {"type": "rule", "strokeDash": [5, 4], "color": "#888888"},
                "encoding": {"y": y},
            },
        ],
    )


def _step_seconds(comparison: RunComparison) -> Spec:
    values: list[Spec] = [
        {"variant": variant, "seconds": seconds}
        for variant, runs in comparison.variants.items()
        for run in runs
        for seconds in run.values("time/step_s")
    ]
    order = list(comparison.variants)
    return base(
        values,
        height=60 + 40 * len(order),
        mark={"type": "boxplot", "extent": "min-max"},
        encoding={
            "x": axis("seconds", "seconds of a step", scale={"zero": True}),
            "y": axis("variant", "", "nominal", sort=order),
            "color": axis("variant", "", "nominal", sort=order, legend=None),
        },
    )
