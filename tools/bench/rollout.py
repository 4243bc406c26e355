"""Finished samples per second: synchronous, one-shot, refill, and the limit.

The real collector drives the real engine in this process. Response lengths follow a lognormal
distribution: a sample's length is drawn from its id, so every mode is given the same work. Modes
take turns in rounds, because the machine's speed drifts, and the table shows medians over rounds
with the smallest and the largest value. The *limit* is an engine that is never short of work and
never aborted, with the same number of samples in flight.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from april_rl.config.choices import ComputeDtype
from april_rl.config.engine import EngineConfig
from april_rl.lab.simulator.engine_cost import EngineCost, fit_cost
from april_rl.start.planning.layout import pick_device, precision
from bench.limit import Limit
from bench.modes import (
    ANY_COST,
    MAX_BATCHED_TOKENS,
    PROMPT_TOKENS,
    CollectorMode,
    KeepingEngine,
    Slice,
)

# The benchmark uses the tests' random model.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

# Uncounted steps of each mode, after which parked samples are prefilled and caches are warm.
_WARMUP_STEPS = 3
Mode = CollectorMode | Limit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rollout`."""
    parser.add_argument(
        "--full", action="store_true", help="also run α 1, 1.5 and 2, which takes twice as long"
    )
    parser.add_argument("--factors", type=float, nargs="+", help="values of α; default: 1.5")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, in which modes take turns")
    parser.add_argument("--steps", type=int, default=2, help="steps of each mode in a round")
    # With over-sampling, the first steps train short responses only, while the slots fill up with
    # long ones: measured too early, a mode looks faster than it is. A response of full length takes
    # α · 640 ÷ 100 (the mean) steps: 19 with α = 3, which auto needs a dozen steps to reach.
    parser.add_argument(
        "--simulated-steps", type=int, default=40, help="steps of each mode before the engine's"
    )
    parser.add_argument("--median-tokens", type=float, default=64.0, help="median response length")
    parser.add_argument("--sigma", type=float, default=1.0, help="standard deviation of log length")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    # Above α = (cap + 1) · mean ÷ longest length, 2.6 here, steps alternate: some wait at the cap
    # with empty slots, others find their groups ready. A few steps would not show the mean.
    parser.add_argument("--max-staleness", type=int, default=16)
    sizes = {"num-groups": 16, "group-size": 8, "max-response-tokens": 640, "tick-steps": 8}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every mode and print the table; return its rows."""
    args.factors = args.factors or ([1.0, 1.5, 2.0] if args.full else [1.5])
    with tempfile.TemporaryDirectory() as folder:
        engine, sync = start(Path(folder), args)
        modes = modes_of(args, engine)
        for mode in track(modes, description="warm-up"):
            if isinstance(mode, CollectorMode):
                mode.simulate(args.simulated_steps, measured_cost(modes))
            mode.run(_WARMUP_STEPS, sync)
        slices: dict[Mode, list[Slice]] = {mode: [] for mode in modes}
        # The order is shuffled in each round: no mode always follows the same other one.
        order = random.Random(0)
        turns = [mode for _ in range(args.rounds) for mode in order.sample(modes, len(modes))]
        for mode in track(turns, description="measuring"):
            slices[mode].append(mode.run(args.steps, sync))
    limits = [mode for mode in modes if isinstance(mode, Limit)]
    rows = []
    for mode in modes:
        limit = min(limits, key=lambda each: abs(each.factor - mode.factor))
        rows.append(row_of(mode, slices[mode], synchronous=slices[modes[0]], limit=slices[limit]))
    show(rows, args)
    return rows


def measured_cost(modes: Sequence[Mode]) -> EngineCost:
    """Return the engine's cost, fitted on the work of the modes so far."""
    ticks = [tick for mode in modes for tick in mode.engine.ticks]
    return fit_cost(ticks) if ticks else ANY_COST


def modes_of(args: argparse.Namespace, engine: KeepingEngine) -> list[Mode]:
    """Return the modes to compare: the synchronous one first, and each refill mode followed by the
    limit with as many samples in flight.
    """

    def mode(factor: float, *, refill: bool = True, keeps: bool = False) -> CollectorMode:
        return CollectorMode(args, engine, factor, refill=refill, keeps=keeps)

    def limit(factor: float) -> Limit:
        return Limit(args, engine, factor=factor)

    modes: list[Mode] = [mode(1.0, refill=False)]
    if 1.0 not in args.factors:
        modes.append(limit(1.0))
    for factor in args.factors:
        if factor > 1:
            modes.append(mode(factor, refill=False))
        modes += [mode(factor), mode(factor, keeps=True), limit(factor)]
    return modes


def start(folder: Path, args: argparse.Namespace) -> tuple[Any, Callable[[], None]]:
    """Return a real engine on a random 0.6 M-parameter Qwen3, and a function that does to it what a
    weight sync does.
    """
    from tiny_models import write_tiny_qwen3
    from transformers import AutoModelForCausalLM

    from april_rl.training.engine.vllm_engine import VllmEngine

    write_tiny_qwen3(folder, hidden_size=128, num_layers=4, initializer_range=0.02)
    most = max(args.factors)
    engine = VllmEngine(
        EngineConfig(
            dtype=precision(ComputeDtype[args.dtype], pick_device("auto")),
            kv_cache_gib=2.0,
            gpu_memory_utilization=0.5,
            args={
                "max_num_batched_tokens": MAX_BATCHED_TOKENS,
                "async_scheduling": pick_device("auto") == "cuda",
            },
        ),
        model_path=str(folder),
        seed=0,
        temperature=1.0,
        max_model_len=args.max_response_tokens + PROMPT_TOKENS,
        max_num_seqs=round(most * args.num_groups * args.group_size),
        keeps_parked=True,
        sleeps=True,
        stop_tokens=(),
    )
    weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    weights.pop("lm_head.weight")
    versions = count(1)
    return engine, lambda: engine.load_weights(iter(weights.items()), policy_version=next(versions))


def row_of(
    mode: Mode, slices: Sequence[Slice], *, synchronous: Sequence[Slice], limit: Sequence[Slice]
) -> dict[str, Any]:
    """Return the medians of a mode over rounds, and the spread of its finished samples per second.

    Its ratios are medians of the ratios within each round: trained samples against the synchronous
    mode, and finished samples against the limit with as many samples in flight.
    """
    finished = [s.finished / s.time_s for s in slices]
    return {
        "mode": mode.name,
        "over_sampling_factor": mode.factor,
        "finished_samples_per_s": median(finished),
        "finished_samples_per_s_min": min(finished),
        "finished_samples_per_s_max": max(finished),
        "of_synchronous": _ratio("trained", slices, synchronous),
        "of_limit": _ratio("finished", slices, limit),
        "generated_tokens_per_s": median(s.generated / s.time_s for s in slices),
        "occupancy": median(s.occupancy for s in slices),
        "reprefill_per_generated_token": median(s.reprefill / max(1, s.generated) for s in slices),
        "controller_frac": median(s.controller_s / s.time_s for s in slices),
    }


def _ratio(count: str, slices: Sequence[Slice], others: Sequence[Slice]) -> float:
    pairs = zip(slices, others, strict=True)
    return median((getattr(a, count) / a.time_s) / (getattr(b, count) / b.time_s) for a, b in pairs)


def show(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    """Print the table."""
    table = Table(
        title="finished samples per second, medians of rounds; response tokens: lognormal, median "
        f"{args.median_tokens:g}, σ {args.sigma:g}, at most {args.max_response_tokens}"
    )
    heads = ("mode", "α", "samples/s", "min-max", "÷ sync", "÷ limit", "tokens/s", "busy")
    for head in (*heads, "re-prefill", "controller"):
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
        )
    Console(width=115).print(table)
