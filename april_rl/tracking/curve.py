"""The reward curve of one or several runs as a picture, from their metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from april_rl.tracking.metrics_file import read_metrics

Series = dict[int, float]  # step: value

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # Okabe and Ito 2008
_SIZE_INCHES, _DPI = (9.6, 3.6), 150
_INK, _GRID = "#404040", "#e4e4e4"


def reward_curve(set_ups: Mapping[str, Sequence[Path]], out: Path) -> None:
    """Writes a PNG: held-out accuracy (where a run has it) and training reward against the step.

    `set_ups` maps a label to the metrics.jsonl of its seeds: each a thin line, their mean a thick
    one over the steps that all of them have. Raises ValueError naming the file without any reward.
    """
    rows = {label: [read_metrics(path) for path in paths] for label, paths in set_ups.items()}
    names = sorted({name for runs in rows.values() for run in runs for name in _evaluated(run)})
    panels = [
        (
            f"held-out accuracy, {name}" if len(names) > 1 else "held-out accuracy",
            f"eval/{name}/avg_at_k",
        )
        for name in names
    ]
    panels.append(("training reward, mean of a step", "reward/mean"))
    for label, paths in set_ups.items():
        for path, run in zip(paths, rows[label], strict=True):
            if not _series(run, "reward/mean") and not _evaluated(run):
                raise ValueError(f"{path} holds neither reward/mean nor eval/<set>/avg_at_k")
    figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(1, len(panels), sharex=True, squeeze=False)[0]
    for axes, (title, key) in zip(all_axes, panels, strict=True):
        _draw_panel(axes, rows, title=title, key=key)
    all_axes[-1].legend(frameon=False, fontsize=8, labelcolor=_INK, loc="best")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png")


def mean_series(seeds: Sequence[Series]) -> Series:
    """The mean over seeds at the steps that all of them have."""
    steps = sorted(set.intersection(*(set(series) for series in seeds))) if seeds else []
    return {step: sum(series[step] for series in seeds) / len(seeds) for step in steps}


def _draw_panel(
    axes: Axes,
    rows: Mapping[str, Sequence[Sequence[Mapping[str, float | None]]]],
    *,
    title: str,
    key: str,
) -> None:
    """One quantity of every set-up."""
    for n, (label, runs) in enumerate(rows.items()):
        seeds = [series for run in runs if (series := _series(run, key))]
        _draw_seeds(axes, seeds, label=label, colour=_COLOURS[n % len(_COLOURS)])
    axes.set_title(title, loc="left", fontsize=10, color=_INK)
    axes.set_xlabel("step", fontsize=9, color=_INK)
    axes.set_xlim(left=0)
    low, high = axes.get_ylim()
    # Rewards and accuracies are shares as a rule: then the whole scale keeps the picture honest.
    if low >= -0.1 and high <= 1.1:
        axes.set_ylim(-0.03, 1.03)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.tick_params(labelsize=8, length=0, colors=_INK)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)


def _draw_seeds(axes: Axes, seeds: Sequence[Series], *, label: str, colour: str) -> None:
    """The mean, and behind it each seed when there are several; nothing of no seeds."""
    if len(seeds) > 1:
        for series in seeds:
            axes.plot(list(series), list(series.values()), color=colour, linewidth=0.8, alpha=0.35)
        label = f"{label} (mean of {len(seeds)} seeds)"
    mean = mean_series(seeds)
    # Few points are measurements to be seen, many are a line.
    marker = "o" if len(mean) <= 30 else ""
    axes.plot(
        list(mean),
        list(mean.values()),
        color=colour,
        linewidth=1.8,
        marker=marker,
        markersize=4,
        label=label,
    )


def _series(run: Sequence[Mapping[str, float | None]], key: str) -> Series:
    """The finite values of a key by step, in order."""
    values = {int(row["step"] or 0): row.get(key) for row in run}
    return {
        step: value
        for step, value in sorted(values.items())
        if value is not None and math.isfinite(value)
    }


def _evaluated(run: Sequence[Mapping[str, float | None]]) -> set[str]:
    """The names of the evaluation sets that a run has accuracies of."""
    keys = {key for row in run for key in row}
    return {
        key.split("/")[1] for key in keys if key.startswith("eval/") and key.endswith("/avg_at_k")
    }
