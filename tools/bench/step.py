"""Trained tokens per second of whole steps, and where the time goes: the trainer as users run it.

A random 0.6 M-parameter Qwen3 with a character vocabulary ends its responses by chance: lengths are
about geometric. Each mode is a run of its own (real Ray, vLLM, FSDP2, reward pool); runs take turns
in rounds. Ratios are to the first mode. With --trl, TRL's GRPOTrainer comes first, on the same
model and data, with batches of as many samples, alone and with partial rollouts at the factors
given.

    tools/bench.py step --trl 1.5
    tools/bench.py step --set engine.cuda_graphs=false \\
        --mode off engine.args.async_scheduling=false --mode on engine.args.async_scheduling=true
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

# Settings by name: the synchronous trainer, and ours.
MODES = {
    "synchronous": ("rollout.over_sampling_factor=1", "rollout.refill=false"),
    "refill, α 1.5": ("rollout.over_sampling_factor=1.5",),
    "refill, α 2": ("rollout.over_sampling_factor=2",),
}
_MISMATCH = "mismatch/logprob_abs_mean"
_NUMBERS = (
    ("--rounds", 2, "rounds, in which every mode has a run"),
    ("--steps", 12, "steps of each run"),
    ("--warmup-steps", 4, "uncounted steps of each run"),
    ("--num-groups", 16, "trainer.num_groups"),
    ("--group-size", 8, "rollout.group_size"),
    ("--max-response-tokens", 512, "rollout.max_response_tokens"),
)
_PARTS = ("rollout", "update", "weight_sync")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `step`."""
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; default: a random one")
    for name, default, meaning in _NUMBERS:
        parser.add_argument(name, type=int, default=default, help=meaning)
    parser.add_argument(
        "--set",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="settings of every run",
    )
    parser.add_argument(
        "--trl",
        type=float,
        nargs="*",
        metavar="FACTOR",
        help="TRL alone, and with partial rollouts at these factors (needs requirements/trl.txt)",
    )
    parser.add_argument(
        "--mode",
        nargs="+",
        action="append",
        metavar=("NAME", "KEY=VALUE"),
        help=f"a mode and its settings; may be repeated; default: {' / '.join(MODES)}",
    )


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every mode and print the table; return its rows."""
    from tiny_models import write_tiny_qwen3

    modes = {name: tuple(own) for name, *own in args.mode} if args.mode else MODES
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if args.model is None:
            args.model = folder / "model"
            write_tiny_qwen3(args.model, hidden_size=128, num_layers=4, initializer_range=0.02)
        data = folder / "sums.jsonl"
        rows = ({"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(64) for b in range(64))
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        trl = {} if args.trl is None else {"TRL": None, **{f"TRL, α {f:g}": f for f in args.trl}}
        turns = [mode for _ in range(args.rounds) for mode in (*trl, *modes)]
        for i, name in enumerate(track(turns, description="runs")):
            run_dir = folder / f"run_{i}"
            if name in trl:
                steps = _run_trl(args, data, run_dir, factor=trl[name])
                found.setdefault(name, []).extend(steps[args.warmup_steps :])
                continue
            settings = {**_common(args, data), **_by_key([*args.settings, *modes[name]])}
            steps = _run(settings, run_dir)
            found.setdefault(name, []).extend(steps[args.warmup_steps :])
    table = [(_trl_row if name in trl else _row)(name, steps) for name, steps in found.items()]
    for row in table:
        row["of_first"] = row["trained_tokens_per_s"] / table[0]["trained_tokens_per_s"]
    _show(table)
    return table


def _common(args: argparse.Namespace, data: Path) -> dict[str, str]:
    """Return the settings of every run, unless --set or the mode changes them."""
    return _by_key(
        [
            *("name=bench", f"model.path={args.model}", f"data.path={data}"),
            *("data.template=plain", "data.max_prompt_tokens=32", "tracking.wandb=disabled"),
            f"trainer.num_steps={args.steps}",
            *(f"trainer.num_groups={args.num_groups}", f"rollout.group_size={args.group_size}"),
            f"rollout.max_response_tokens={args.max_response_tokens}",
            *("learner.max_tokens=8192", "optimizer.lr=1e-6", "runtime.device=cpu"),
        ]
    )


def _by_key(settings: Sequence[str]) -> dict[str, str]:
    return {setting.partition("=")[0]: setting for setting in settings}


def _run(settings: Mapping[str, str], run_dir: Path) -> list[dict[str, float]]:
    """Return the metrics of the steps of one run."""
    program = [sys.executable, "-m", "april_rl.train", f"hydra.run.dir={run_dir}"]
    command = [*program, *settings.values()]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    return [step for step in steps if "time/step_s" in step]


def _run_trl(
    args: argparse.Namespace, data: Path, run_dir: Path, *, factor: float | None
) -> list[dict[str, float]]:
    """Return seconds and tokens of the steps of one run of TRL's trainer."""
    settings = {
        **{"model": str(args.model), "data": str(data), "folder": str(run_dir)},
        **{"steps": args.steps, "num_groups": args.num_groups, "group_size": args.group_size},
        **{"max_response_tokens": args.max_response_tokens, "over_sampling_factor": factor},
    }
    command = [sys.executable, str(Path(__file__).parent / "trl_steps.py"), json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"step_s"')]


def _trl_row(name: str, steps: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return a row as `_row` does; TRL's rollout includes its weight sync."""
    rates = [step["tokens"] / step["step_s"] for step in steps]
    total_s = sum(step["step_s"] for step in steps)
    rollout_frac = sum(step["rollout_s"] for step in steps) / total_s
    return {
        "mode": name,
        "over_sampling_factor": float(name.partition("α ")[2] or 1),
        "trained_tokens_per_s": sum(step["tokens"] for step in steps) / total_s,
        "trained_tokens_per_s_min": min(rates),
        "trained_tokens_per_s_max": max(rates),
        "step_s": total_s / len(steps),
        "rollout_frac": rollout_frac,
        "update_frac": 1 - rollout_frac,
        "weight_sync_frac": 0.0,
    }


def _row(name: str, steps: Sequence[dict[str, float]]) -> dict[str, Any]:
    rates = [s["throughput/trained_tokens_per_s"] for s in steps]
    total_s = sum(s["time/step_s"] for s in steps)
    tokens = sum(s["throughput/trained_tokens_per_s"] * s["time/step_s"] for s in steps)
    return {
        "mode": name,
        "over_sampling_factor": steps[-1]["rollout/over_sampling_factor"],
        "trained_tokens_per_s": tokens / total_s,
        "trained_tokens_per_s_min": min(rates),
        "trained_tokens_per_s_max": max(rates),
        "step_s": total_s / len(steps),
        "weight_sync_s": median(s["time/weight_sync_s"] for s in steps),
        "synced_bytes": steps[-1]["sync/bytes"],
        "occupancy": fmean(s["rollout/occupancy"] for s in steps),
        "reprefill_tokens": fmean(s["rollout/reprefill_tokens"] for s in steps),
        "response_tokens_mean": median(s["rollout/response_tokens_mean"] for s in steps),
        "response_tokens_p99": median(s["rollout/response_tokens_p99"] for s in steps),
        "mismatch": [s[_MISMATCH] for s in steps if _MISMATCH in s],  # nats, for each step
        **{f"{part}_frac": sum(s[f"time/{part}_s"] for s in steps) / total_s for part in _PARTS},
    }


def _show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title="whole steps")
    heads = ("mode", "α", "trained tokens/s (min-max)", "÷ first", "step", *_PARTS)
    for head in heads:
        table.add_column(head, justify="left" if head == "mode" else "right")
    for row in rows:
        low, high = row["trained_tokens_per_s_min"], row["trained_tokens_per_s_max"]
        table.add_row(
            row["mode"],
            f"{row['over_sampling_factor']:g}",
            f"{row['trained_tokens_per_s']:,.0f} ({low:,.0f}-{high:,.0f})",
            f"{row['of_first']:.2f}",
            f"{row['step_s']:.2f} s",
            *(f"{100 * row[f'{key}_frac']:.0f} %" for key in _PARTS),
        )
    Console().print(table)
