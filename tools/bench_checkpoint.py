"""How long training pauses for a checkpoint, against a save that blocks training.

A learner of one rank makes an optimizer step, so that its moments exist. Then it is saved as in a
run: training pauses for a copy in memory, and a thread writes, syncs and hashes the files while it
goes on. A save that blocks training would take both.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from bench_models import SIZES, write_random_model
from bench_modes import CappedLognormal
from bench_rows import Work, group_of_one, load_config, make_rows
from rich.console import Console
from rich.progress import track
from rich.table import Table

from april_rl.learner.learner import Learner
from april_rl.runtime.saving import BackgroundWrite
from april_rl.runtime.worker_parts import build_learner

_CPU = torch.device("cpu")
_POLL_S = 0.01
_WORK = Work(
    num_groups=1,
    group_size=2,
    prompt_tokens=8,
    length_of=CappedLognormal(median_tokens=16, sigma=0.5, max_tokens=32),
)


class _Save(NamedTuple):
    """Times of one checkpoint, in seconds from its beginning."""

    pause_s: float  # until training may go on
    whole_s: float  # until all is on the disk and hashed


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `checkpoint`."""
    parser.add_argument("--sizes", choices=SIZES, nargs="+", default=("tiny", "medium"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="folder on the disk to measure; default: temporary"
    )


def bench_checkpoint(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every size, print the table; returns its rows."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder, group_of_one(_CPU):
        rows = [_bench_size(args, name, Path(folder) / name) for name in args.sizes]
    _show(rows)
    return rows


def _bench_size(args: argparse.Namespace, name: str, folder: Path) -> dict[str, Any]:
    size = SIZES[name]
    write_random_model(folder / "model", size)
    config = load_config(folder / "model")
    learner = build_learner(config, device=_CPU.type)
    rows = make_rows(
        config, learner, _WORK, vocabulary=size.vocabulary, hidden_size=size.hidden_size
    )
    learner.update([rows])
    saves = []
    for number in track(range(1 + args.rounds), description=f"{name}: saving"):
        shutil.rmtree(folder / "saved", ignore_errors=True)
        saves.append(_save(learner, folder / "saved"))
        if number == 0:
            saves.clear()  # the first one finds no pages that the process has used before
    num_bytes = sum(file.stat().st_size for file in (folder / "saved").iterdir())
    started = time.perf_counter()
    learner.restore(folder / "saved")
    restore_s = time.perf_counter() - started
    pauses, ratios = [save.pause_s for save in saves], [s.pause_s / s.whole_s for s in saves]
    return {
        "size": name,
        "num_parameters": num_bytes // 12,  # a float32 master and two moments
        "bytes": num_bytes,
        "pause_s": median(pauses),
        "pause_s_max": max(pauses),
        "whole_s": median(save.whole_s for save in saves),
        "ratio": median(ratios),
        "ratio_max": max(ratios),
        "restore_s": restore_s,
    }


def _save(learner: Learner, folder: Path) -> _Save:
    started = time.perf_counter()
    writing = BackgroundWrite(learner.snapshot().write, folder)
    pause_s = time.perf_counter() - started
    while (written := writing.outcome()) is None:
        time.sleep(_POLL_S)
    if written.error:
        raise SystemExit(f"{folder}: {written.error}")
    return _Save(pause_s, time.perf_counter() - started)


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="a checkpoint of one learner rank, medians of rounds")
    for head in ("size", "parameters", "MiB", "pause", "whole save", "pause ÷ whole (max)", "read"):
        table.add_column(head, justify="left" if head == "size" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["size"],
            f"{row['num_parameters'] / 1e6:.1f} M",
            f"{row['bytes'] / 2**20:,.0f}",
            f"{row['pause_s']:.3f} s",
            f"{row['whole_s']:.2f} s",
            f"{row['ratio']:.3f} ({row['ratio_max']:.3f})",
            f"{row['restore_s']:.2f} s",
        )
    Console(width=120).print(table)
