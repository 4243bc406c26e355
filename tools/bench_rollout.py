"""How fast samples are finished: synchronous, one-shot and refill at several over-sampling factors,
and the limit.

The real collector drives the real engine in this process. Response lengths follow a lognormal law:
a sample's length is drawn from its id, so every mode is given the same work. Modes take turns in
rounds, because the machine's speed drifts, and the table shows medians over rounds with the
smallest and the largest value. The *limit* is an engine that is never short of work and never
aborted, with the same number of samples in flight.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from bench_modes import PROMPT_TOKENS, CollectorMode, LawfulEngine, LengthLaw, Limit, Slice
from rich.console import Console
from rich.progress import track
from rich.table import Table

from april_rl.types import SampleId

# The benchmark's model is the tests' random one.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

FACTORS = (1.0, 1.5, 2.0, 3.0)


def add_rollout_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `rollout`."""
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="steps of each mode in a round")
    parser.add_argument("--warmup-steps", type=int, default=3, help="of each mode, not counted")
    parser.add_argument("--num-groups", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--median-tokens", type=float, default=64.0, help="of the length law")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the length law's logarithm")
    parser.add_argument("--max-response-tokens", type=int, default=640)
    parser.add_argument("--tick-steps", type=int, default=8)
    parser.add_argument("--factors", type=float, nargs="+", default=FACTORS)


Mode = CollectorMode | Limit


def bench_rollout(args: argparse.Namespace) -> list[dict[str, object]]:
    """Measure every mode, print the table; returns its rows."""
    with tempfile.TemporaryDirectory() as folder:
        engine, sync = start_engine(Path(folder), args)
        law = LengthLaw(
            median_tokens=args.median_tokens, sigma=args.sigma, max_tokens=args.max_response_tokens
        )
        lawful = LawfulEngine(engine, law)
        modes: list[Mode] = [CollectorMode(args, lawful, factor=1.0, refill=False)]
        # What is compared stands side by side: refill and the limit with as many in flight.
        for factor in args.factors:
            if factor > 1:
                modes.append(CollectorMode(args, lawful, factor=factor, refill=False))
            modes.append(CollectorMode(args, lawful, factor=factor, refill=True))
            modes.append(Limit(args, lawful, factor=factor))
        for mode in track(modes, description="warm-up"):
            mode.run(args.warmup_steps, sync)
        slices: dict[int, list[Slice]] = {id(mode): [] for mode in modes}
        turns = [mode for _ in range(args.rounds) for mode in modes]
        for mode in track(turns, description="measuring"):
            slices[id(mode)].append(mode.run(args.steps, sync))
    limits = {mode.factor: slices[id(mode)] for mode in modes if mode.name == "limit"}
    found = slices[id(modes[0])]
    rows = [
        row_of(mode, slices[id(mode)], synchronous=found, limit=limits[mode.factor])
        for mode in modes
    ]
    show(rows, law)
    return rows


def start_engine(folder: Path, args: argparse.Namespace) -> tuple[Any, Callable[[], None]]:
    """A real engine on a random 0.6 M-parameter Qwen3, and a call that does what a weight sync does
    to it.
    """
    from tiny_models import write_tiny_qwen3
    from transformers import AutoModelForCausalLM

    from april_rl.engine.vllm_engine import VllmEngine

    write_tiny_qwen3(folder, hidden_size=128, num_layers=4, initializer_range=0.02)
    slots = round(max(args.factors) * args.num_groups * args.group_size)
    engine = VllmEngine(
        model_path=str(folder),
        seed=0,
        dtype="bfloat16",
        max_model_len=args.max_response_tokens + PROMPT_TOKENS,
        max_num_seqs=slots,
        max_batched_tokens=1024,  # on CPU, short parts of a prefill stay in the cache
        kv_cache_gib=2.0,
        gpu_memory_utilization=0.5,
        enforce_eager=False,
        temperature=1.0,
        stop_tokens=(),
    )
    weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    weights.pop("lm_head.weight")
    versions = count(1)
    return engine, lambda: engine.load_weights(iter(weights.items()), policy_version=next(versions))


def row_of(
    mode: Mode, slices: Sequence[Slice], *, synchronous: Sequence[Slice], limit: Sequence[Slice]
) -> dict[str, object]:
    """The medians of a mode over rounds, and the spread of its finished samples per second.

    Its ratios are medians of the ratios within each round: to the synchronous mode, and to the
    limit with as many samples in flight.
    """
    finished = [s.finished / s.time_s for s in slices]
    return {
        "mode": mode.name,
        "over_sampling_factor": mode.factor,
        "finished_samples_per_s": median(finished),
        "finished_samples_per_s_min": min(finished),
        "finished_samples_per_s_max": max(finished),
        "of_synchronous": _ratio(slices, synchronous),
        "of_limit": _ratio(slices, limit),
        "trained_samples_per_s": median(s.trained / s.time_s for s in slices),
        "generated_tokens_per_s": median(s.generated / s.time_s for s in slices),
        "occupancy": median(s.occupancy for s in slices),
        "reprefill_tokens": median(s.reprefill for s in slices),
        "reprefill_per_generated_token": median(s.reprefill / s.generated for s in slices),
        "controller_frac": median(s.controller_s / s.time_s for s in slices),
    }


def _ratio(slices: Sequence[Slice], others: Sequence[Slice]) -> float:
    pairs = zip(slices, others, strict=True)
    return median((a.finished / a.time_s) / (b.finished / b.time_s) for a, b in pairs)


def show(rows: Sequence[dict[str, Any]], law: LengthLaw) -> None:
    """The table, and the two ratios that count."""
    lengths = [law(SampleId(i, j)) for i in range(500) for j in range(8)]
    p50, p99 = np.percentile(lengths, (50, 99))
    table = Table(
        title=f"finished samples per second, medians of rounds; response tokens: mean "
        f"{np.mean(lengths):.0f}, p50 {p50:.0f}, p99 {p99:.0f}, max {max(lengths)}"
    )
    heads = ("mode", "α", "samples/s", "min-max", "÷ sync", "÷ limit", "tokens/s", "occupied")
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
    console = Console(width=110)
    console.print(table)
    refills = [row for row in rows if row["mode"] == "refill"]
    best = max(refills, key=lambda row: row["finished_samples_per_s"])
    console.print(
        f"refill at its best α ({best['over_sampling_factor']:g}): {best['of_synchronous']:.2f} × "
        f"synchronous, {best['of_limit']:.2f} of the limit with as many samples in flight"
    )
