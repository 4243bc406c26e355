"""The table of the rollout benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from bench_modes import NO_SIGNAL_FRAC, CappedLognormal
from rich.console import Console
from rich.table import Table

from april_rl.types import SampleId


def show(rows: Sequence[dict[str, Any]], length_of: CappedLognormal, notes: Sequence[str]) -> None:
    """Print the table, the main ratios, and other notes."""
    lengths = [length_of(SampleId(i, j)) for i in range(500) for j in range(8)]
    p50, p99 = np.percentile(lengths, (50, 99))
    table = Table(
        title=f"finished samples per second, medians of rounds; response tokens: mean "
        f"{np.mean(lengths):.0f}, p50 {p50:.0f}, p99 {p99:.0f}, max {max(lengths)}"
    )
    heads = ("mode", "α", "samples/s", "min-max", "÷ sync", "÷ limit", "tokens/s", "busy")
    for head in (*heads, "re-prefill", "controller", "simulated"):
        table.add_column(head, justify="left" if head == "mode" else "right", no_wrap=True)
    for row in rows:
        low, high = row["finished_samples_per_s_min"], row["finished_samples_per_s_max"]
        table.add_row(
            row["mode"],
            f"{row['over_sampling_factor']:g}",
            f"{row['finished_samples_per_s']:.1f}",
            f"{low:.0f}-{high:.0f}",
            f"{row['of_synchronous']:.2f}",
            f"{row['of_limit']:.2f}",
            f"{row['generated_tokens_per_s']:,.0f}",
            f"{row['occupancy']:.2f}",
            f"{row['reprefill_per_generated_token']:.2f}",
            f"{100 * row['controller_frac']:.1f} %",
            f"{100 * row['simulation_error']:+.0f} %" if "simulation_error" in row else "",
        )
    console = Console(width=125)
    console.print(table)
    for line in (*notes, *conclusions(rows)):
        console.print(line)


def conclusions(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the main ratios, in words."""
    lines = []
    for resume in ("reprefill", "keep"):
        fixed = _refills(rows, resume=resume, is_filtered=False, is_auto=False)
        best = max(fixed, key=_samples_per_s)
        lines.append(
            f"{best['mode']} at its best α ({best['over_sampling_factor']:g}): "
            f"{best['of_synchronous']:.2f} × synchronous, {best['of_limit']:.2f} of the limit "
            "with as many samples in flight"
        )
        for row in _refills(rows, resume=resume, is_auto=True):
            lines.append(
                f"auto ends at α {row['over_sampling_factor']:g}, with "
                f"{_samples_per_s(row) / _samples_per_s(best):.2f} of the samples/s of the best"
            )
        for row in _refills(rows, resume=resume, is_filtered=True):
            factor = row["over_sampling_factor"]
            same = [other for other in fixed if other["over_sampling_factor"] == factor]
            lines += [_of_the_gain(row, plain, synchronous=rows[0]) for plain in same]
    errors = [abs(row["simulation_error"]) for row in rows if "simulation_error" in row]
    lines.append(
        f"the simulator is off by {100 * max(errors):.0f} % at most, {100 * median(errors):.0f} % "
        "in the median"
    )
    return lines


def _refills(rows: Sequence[dict[str, Any]], **wanted: object) -> list[dict[str, Any]]:
    return [
        row
        for row in rows
        if row["mode"].startswith("refill") and all(row[key] == wanted[key] for key in wanted)
    ]


def _samples_per_s(row: dict[str, Any]) -> float:
    value: float = row["finished_samples_per_s"]
    return value


def _of_the_gain(
    filtered: dict[str, Any], plain: dict[str, Any], *, synchronous: dict[str, Any]
) -> str:
    """How much of the gain is left when half of the groups are rejected.

    Over the synchronous loop with the same filter, which starts a group for each rejected one; and
    over one that generates whole batches until enough groups are kept, which trains at the rate of
    the loop without a filter times the share that is kept.
    """
    gain, gain_filtered = plain["of_synchronous"] - 1, filtered["of_synchronous"] - 1
    whole_batches = synchronous["trained_samples_per_s"] * (1 - NO_SIGNAL_FRAC)
    gain_over_batches = filtered["trained_samples_per_s"] / whole_batches - 1
    return (
        f"{filtered['mode']}, half of the groups rejected: {100 * gain_filtered:+.0f} % trained "
        f"samples/s over synchronous with the same filter, {gain_filtered / gain:.2f} of the gain "
        f"without it ({100 * gain:+.0f} %); {100 * gain_over_batches:+.0f} %, "
        f"{gain_over_batches / gain:.2f} of it, over whole batches"
    )
