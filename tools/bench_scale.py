"""What a step costs the controller with 1, 8, 64 and 512 engines, against the rollout's own time.

In a simulation of the tick protocol the real collector drives simulated engines on a virtual clock;
with few engines the same goes over real Ray, and what a tick and a sample cost there is carried
over to the larger ones. All figures are CPU seconds of the controller's process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from bench_scale_engines import tick_steps
from bench_scale_ray import RayCost, measure_ray
from bench_scale_simulated import SimulatedRun, StepCost
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

ENGINES, RAY_ENGINES = (1, 8, 64, 512), (1, 8, 64)
LIMIT = 0.03  # of the rollout's time


def add_scale_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `scale`."""
    parser.add_argument("--engines", type=int, nargs="+", default=ENGINES)
    parser.add_argument("--ray-engines", type=int, nargs="*", default=RAY_ENGINES)
    parser.add_argument(
        "--steps", type=int, default=3, help="measured steps for each number of engines"
    )
    parser.add_argument("--warmup-steps", type=int, default=2, help="steps that fill the buffer")
    parser.add_argument("--samples-per-engine", type=int, default=256, help="samples in flight")
    parser.add_argument("--over-sampling-factor", type=float, default=1.5)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--mean-tokens", type=float, default=2700.0, help="mean response length")
    parser.add_argument("--sigma", type=float, default=0.9, help="standard deviation of log length")
    parser.add_argument("--max-tokens", type=int, default=16_384, help="longest response")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--tokens-per-s", type=float, default=30.0, help="tokens/s of a sample")
    parser.add_argument("--tick-steps", type=int, help="default: as with rollout.tick_steps=auto")
    parser.add_argument("--max-staleness", type=int, default=5)


def bench_scale(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every number of engines and print the table; return its rows."""
    over_ray: dict[int, RayCost] = {}
    rows: list[dict[str, Any]] = []
    with Progress(transient=True) as progress:
        for num_engines in args.ray_engines:
            shown = progress.add_task(f"{num_engines} over Ray", total=None)
            over_ray[num_engines] = measure_ray(args, num_engines, on_progress=_to(progress, shown))
        largest = over_ray[max(over_ray)] if over_ray else None
        for num_engines in args.engines:
            steps = args.warmup_steps + args.steps
            shown = progress.add_task(f"{num_engines} simulated", total=steps)
            run = SimulatedRun(args, num_engines)
            costs = []
            for _ in range(steps):
                costs.append(run.step(lambda _ready: None))
                progress.advance(shown)
            steps_of_tick = tick_steps(args, num_engines)
            measured = costs[args.warmup_steps :]
            rows.append(_row(num_engines, steps_of_tick, measured, over_ray, largest))
    _show(args, rows, over_ray)
    return rows


def _to(progress: Progress, task: TaskID) -> Callable[[int], None]:
    """Return a callback that shows how many groups are ready."""
    return lambda ready: progress.update(task, completed=ready)


def _row(
    num_engines: int,
    tick_steps: int,
    costs: Sequence[StepCost],
    over_ray: dict[int, RayCost],
    largest: RayCost | None,
) -> dict[str, Any]:
    """Return medians over steps, with Ray's costs for that many engines, or for the most that were
    measured.
    """
    row = {key: median(asdict(cost)[key] for cost in costs) for key in asdict(costs[0])}
    samples = row["finished_samples"] + row["aborted_samples"]
    row |= {
        "engines": num_engines,
        "tick_steps": tick_steps,
        "collect_s": median(cost.collect_s for cost in costs),
        "controller_s": median(cost.controller_s for cost in costs),
        "share": median(cost.controller_s / cost.rollout_s for cost in costs),
        "per_tick_s": row["generate_s"] / row["ticks"],
        "per_sample_s": (row["fill_s"] + row["park_s"]) / samples,
    }
    ray = over_ray.get(num_engines, largest)
    if ray is not None:
        row |= {
            "is_ray_extrapolated": num_engines not in over_ray,
            "ray_ticks_s": row["ticks"] * ray.empty_tick_s,
            "ray_samples_s": samples * ray.sample_s,
        }
        total_s = row["controller_s"] + row["ray_ticks_s"] + row["ray_samples_s"]
        row["share_with_ray"] = total_s / row["rollout_s"]
    return row


def _show(
    args: argparse.Namespace, rows: Sequence[dict[str, Any]], over_ray: dict[int, RayCost]
) -> None:
    table = Table(
        title=f"controller, CPU seconds a step; {args.samples_per_engine} samples in flight on "
        "each engine"
    )
    parts = ("fill", "generate", "park", "reward", "plan", "metrics")
    heads = ("engines", "rollout", "ticks", "of steps", *parts)
    for head in (*heads, "share", "a tick", "a sample", "Ray: ticks", "samples", "with Ray"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row['engines']}",
            f"{row['rollout_s']:.0f} s",
            f"{row['ticks']:,.0f}",
            f"{row['tick_steps']}",
            *(f"{row[f'{part}_s']:.3f}" for part in parts),
            f"{100 * row['share']:.2f} %",
            f"{1e6 * row['per_tick_s']:.0f} µs",
            f"{1e6 * row['per_sample_s']:.0f} µs",
            *_ray_cells(row),
        )
    console = Console(width=160)
    console.print(table)
    console.print("* cost of a tick and a sample over Ray extrapolated from fewer engines")
    for num_engines, cost in over_ray.items():
        console.print(
            f"{num_engines} over real Ray: {1e6 * cost.empty_tick_s:.0f} µs a tick, "
            f"{1e6 * cost.sample_s:.0f} µs a sample; engines have nothing to compute for "
            f"{100 * cost.idle_frac:.2f} % of the rollout ({cost.ticks} ticks in "
            f"{cost.rollout_s:.1f} s on a clock {cost.faster:g} times faster; first tick after "
            f"{1e3 * cost.first_tick_s:.0f} ms, stopped and parked "
            f"{1e3 * cost.stop_s:.0f} ms after the last group was ready)"
        )
    over = [row["engines"] for row in rows if row["share"] > LIMIT]
    console.print(
        f"more than {100 * LIMIT:.0f} % of the rollout with {over} engines"
        if over
        else f"at most {100 * LIMIT:.0f} % of the rollout everywhere, without Ray's part"
    )


def _ray_cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "ray_ticks_s" not in row:
        return ("", "", "")
    mark = "*" if row["is_ray_extrapolated"] else ""
    return (
        f"{row['ray_ticks_s']:.3f}{mark}",
        f"{row['ray_samples_s']:.3f}{mark}",
        f"{100 * row['share_with_ray']:.1f} %{mark}",
    )
