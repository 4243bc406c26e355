"""Tokens per second of one update: the learner, a plain loop over the same packed rows, and padded
batches of the same samples.

All of them make the same step with the settings of the recipe `tiny_cpu`: that their losses and
gradient norms agree is checked before anything is timed. They take turns in rounds in one process;
peak memory, weights and optimizer included, is that of a fresh process each. Tokens are prompt and
response tokens, never padding.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from bench_loops import Outcome, packed_loop, padded_loop
from bench_memory import PeakMemory, in_fresh_process
from bench_models import SIZES, write_random_model
from bench_modes import CappedLognormal
from bench_rows import (
    Work,
    group_of_one,
    load_config,
    make_rows,
    num_tokens,
)
from rich.console import Console
from rich.progress import track
from rich.table import Table

from april_rl.batch.packing import MicroBatch
from april_rl.config import TrainConfig
from april_rl.runtime.worker_parts import build_learner

_CPU = torch.device("cpu")
LEARNER, PLAIN = "learner", "plain loop"
MODES = (LEARNER, PLAIN, "padded, sorted", "padded")
_WANTED = 0.9  # of the plain loop's tokens per second
# bfloat16 computation in another order; the loss against the sum of its terms' sizes.
_LOSS_TOLERANCE, _NORM_TOLERANCE = 1e-3, 0.02

Update = Callable[[], Outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and what an update trains it on."""

    size: str
    config: TrainConfig
    rows: Sequence[MicroBatch]


def add_learner_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `learner`."""
    parser.add_argument("--sizes", choices=SIZES, nargs="+", default=("tiny", "small"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=2, help="updates of each mode in a round")
    parser.add_argument("--num-groups", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=24)
    parser.add_argument("--median-tokens", type=float, default=64.0, help="median response length")
    parser.add_argument("--sigma", type=float, default=1.0, help="standard deviation of log length")
    parser.add_argument("--max-response-tokens", type=int, default=640)
    parser.add_argument("--max-tokens", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--compute-dtype", choices=("auto", "bfloat16", "float32"), default="auto")


def bench_learner(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every mode at every size and print the table; return its rows."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, group_of_one(_CPU):
        for name in args.sizes:
            write_random_model(Path(folder) / name, SIZES[name])
            rows += _bench_size(args, name, Path(folder) / name)
    _show(rows, CappedLognormal.of(args))
    return rows


def _bench_size(args: argparse.Namespace, name: str, folder: Path) -> list[dict[str, Any]]:
    config = load_config(
        folder,
        f"rollout.max_response_tokens={args.max_response_tokens}",
        f"learner.max_tokens={args.max_tokens}",
        f"learner.compute_dtype={args.compute_dtype}",
    )
    learner = build_learner(config, device=_CPU.type)
    work = Work(
        num_groups=args.num_groups,
        group_size=args.group_size,
        prompt_tokens=args.prompt_tokens,
        length_of=CappedLognormal.of(args),
    )
    size = SIZES[name]
    rows = make_rows(
        config, learner, work, vocabulary=size.vocabulary, hidden_size=size.hidden_size
    )
    case = Case(size=name, config=config, rows=rows)
    peaks = {
        mode: in_fresh_process(peak_mib, case, mode)
        for mode in track(MODES, description=f"{name}: memory")
    }
    updates = {mode: update_of(case, mode) for mode in MODES}
    _check_agreement({mode: update() for mode, update in updates.items()}, rows)
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    turns = [mode for _ in range(args.rounds) for mode in MODES]
    for mode in track(turns, description=f"{name}: time"):
        seconds[mode].append(_time(updates[mode], args.updates))
    return [row_of(case, mode, seconds, peak_mib=peaks[mode]) for mode in MODES]


def update_of(case: Case, mode: str) -> Update:
    """Return a function that makes one optimizer step in this mode; needs a process group."""
    if mode == LEARNER:
        learner = build_learner(case.config, device=_CPU.type)

        def update() -> Outcome:
            metrics = learner.update([case.rows])
            return Outcome(metrics["loss/total"].read(), metrics["loss/grad_norm"].read())

        return update
    if mode == PLAIN:
        return packed_loop(case.config, case.rows, device=_CPU).update
    is_sorted = mode == "padded, sorted"
    return padded_loop(case.config, case.rows, is_sorted=is_sorted, device=_CPU).update


def peak_mib(case: Case, mode: str) -> float:
    """Return the peak memory of this process over two updates, building included."""
    with group_of_one(_CPU), PeakMemory(_CPU) as peak:
        update = update_of(case, mode)
        update()
        update()
    return peak.mib


def _time(update: Update, count: int) -> float:
    """Return the mean seconds of `count` updates."""
    started = time.perf_counter()
    for _ in range(count):
        update()
    return (time.perf_counter() - started) / count


def _check_agreement(outcomes: dict[str, Outcome], rows: Sequence[MicroBatch]) -> None:
    """End the benchmark unless all modes computed the same step."""
    scale = sum(float(np.abs(row.loss_weights * row.advantages).sum()) for row in rows)
    wanted = outcomes[PLAIN]
    for mode, outcome in outcomes.items():
        loss_error = abs(outcome.loss - wanted.loss) / scale
        norm_error = abs(outcome.grad_norm / wanted.grad_norm - 1)
        if loss_error > _LOSS_TOLERANCE or norm_error > _NORM_TOLERANCE:
            sys.exit(f"{mode} does not make the step of the {PLAIN}: {outcome}, not {wanted}")


def row_of(
    case: Case, mode: str, seconds: dict[str, list[float]], *, peak_mib: float
) -> dict[str, Any]:
    """Return medians over rounds; the ratio to the plain loop is the median of the ratios within
    rounds.
    """
    tokens = num_tokens(case.rows)
    ratios = [plain / own for own, plain in zip(seconds[mode], seconds[PLAIN], strict=True)]
    return {
        "size": case.size,
        "mode": mode,
        "num_tokens": tokens,
        "num_rows": len(case.rows),
        "tokens_per_s": tokens / median(seconds[mode]),
        "tokens_per_s_min": tokens / max(seconds[mode]),
        "tokens_per_s_max": tokens / min(seconds[mode]),
        "of_plain": median(ratios),
        "of_plain_min": min(ratios),
        "of_plain_max": max(ratios),
        "update_s": median(seconds[mode]),
        "peak_mib": peak_mib,
    }


def _show(rows: Sequence[dict[str, Any]], length_of: CappedLognormal) -> None:
    table = Table(
        title=f"one update, medians of rounds; response tokens lognormal, median "
        f"{length_of.median_tokens:g}, sigma {length_of.sigma:g}, at most {length_of.max_tokens}"
    )
    heads = ("size", "mode", "tokens", "update", "tokens/s (min-max)", "÷ plain", "peak")
    for head in heads:
        is_word = head in ("size", "mode")
        table.add_column(head, justify="left" if is_word else "right", no_wrap=True)
    for row in rows:
        low, high = row["tokens_per_s_min"], row["tokens_per_s_max"]
        table.add_row(
            row["size"],
            row["mode"],
            f"{row['num_tokens']:,}",
            f"{row['update_s']:.3f} s",
            f"{row['tokens_per_s']:,.0f} ({low:,.0f}-{high:,.0f})",
            f"{row['of_plain']:.2f}",
            f"{row['peak_mib']:,.0f} MiB",
        )
    console = Console(width=110)
    console.print(table)
    for row in rows:
        if row["mode"] == LEARNER:
            console.print(
                f"{row['size']}: the learner reaches {row['of_plain']:.2f} of the plain loop "
                f"({row['of_plain_min']:.2f}-{row['of_plain_max']:.2f}; asked for: {_WANTED})"
            )
