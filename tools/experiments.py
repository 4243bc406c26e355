"""How algorithms learn from stale tokens: the runs behind a table of docs/experiments.md.

`python tools/experiments.py` runs every set-up with every seed, one after another, and writes the
table after each. Runs that are done are not repeated: stop it when you like, start it again. A
set-up without a finished run in `--out` keeps the row it has in the document.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from april_rl.tracking.metrics_file import read_metrics

PROJECT = Path(__file__).resolve().parent.parent
DOCUMENT = PROJECT / "docs" / "experiments.md"
MARKS = ("<!-- tools/experiments.py: begin -->", "<!-- tools/experiments.py: end -->")
ACCURACY = "eval/held_out/avg_at_k"

_SYNCHRONOUS = ("rollout.over_sampling_factor=1", "rollout.refill=false")
_PARTIAL = ("rollout.over_sampling_factor=2",)
_FOUR = (*_PARTIAL, "trainer.num_minibatches=4")
_FAST = "optimizer.lr=3e-4"
# As the table was measured: a quarter of the 256 tokens, and the whole span of the 0/1 rewards.
_DAPO = ("algorithm=dapo", "algorithm.overlong_buffer_frac=0.25", "algorithm.overlong_penalty=1")
SET_UPS: dict[str, tuple[str, ...]] = {
    "GRPO, synchronous": _SYNCHRONOUS,
    "GRPO, α 2": _PARTIAL,
    "DAPO, synchronous": (*_DAPO, *_SYNCHRONOUS),
    "DAPO, α 2": (*_DAPO, *_PARTIAL),
    "GSPO, synchronous": ("algorithm=gspo", *_SYNCHRONOUS),
    "GSPO, α 2": ("algorithm=gspo", *_PARTIAL),
    "GRPO, α 2, 4 minibatches, no correction": (*_FOUR, "algorithm.correction=none"),
    "GRPO, α 2, 4 minibatches, TIS": _FOUR,
    "GRPO, α 2, 4 minibatches, TIS, age decay 0.8": (*_FOUR, "learner.age_decay=0.8"),
    "policy gradient, α 2, no clip, no correction": (
        *_PARTIAL,
        "algorithm.loss=policy_gradient",
        "algorithm.correction=none",
    ),
    # Three times the recipe's learning rate: where the policy moves far within the staleness cap.
    "GRPO, synchronous, lr 3e-4": (*_SYNCHRONOUS, _FAST),
    "GRPO, synchronous, 4 minibatches, lr 3e-4": (
        *_SYNCHRONOUS,
        "trainer.num_minibatches=4",
        _FAST,
    ),
    "GRPO, α 2, TIS, lr 3e-4": (*_PARTIAL, _FAST),
    "GRPO, α 2, 4 minibatches, TIS, lr 3e-4": (*_FOUR, _FAST),
    "policy gradient, α 2, 4 minibatches, no clip, no correction, lr 3e-4": (
        *_FOUR,
        _FAST,
        "algorithm.loss=policy_gradient",
        "algorithm.correction=none",
    ),
}

Row = Mapping[str, float | None]
Run = Sequence[Row]


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PROJECT / "outputs" / "experiments")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60, help="steps of each run")
    parser.add_argument("--only", default="", help="run only set-ups with this text in their name")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="the file with the table")
    parser.add_argument("--table-only", action="store_true", help="run nothing, write the table")
    return parser.parse_args()


def folder(args: argparse.Namespace, name: str, seed: int) -> Path:
    """Return the run directory of a set-up and a seed."""
    slug = "".join(c if c.isalnum() else "_" for c in name.replace("α", "alpha"))
    return Path(args.out).resolve() / slug / f"seed_{seed}"


def read(run_dir: Path, *, steps: int) -> Run | None:
    """Return the rows of a finished run; None if it does not exist or was cut short."""
    path = run_dir / "metrics.jsonl"
    rows = read_metrics(path) if path.is_file() else []
    is_done = bool(rows) and rows[-1]["step"] == steps and ACCURACY in rows[-1]
    return rows if is_done else None


def train(run_dir: Path, overrides: Sequence[str], *, seed: int, steps: int) -> str:
    """Run one set-up; return its last output if it failed, else "".

    First remove what an interrupted run has left.
    """
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "april_rl.train", "+recipe=tiny_cpu", *overrides,
        f"seed={seed}", f"trainer.num_steps={steps}", f"evaluation.every={steps}",
        "evaluation.num_samples=4", "tracking.wandb=disabled", "tracking.print_samples_every=0",
        f"hydra.run.dir={run_dir}",
    ]  # fmt: skip
    log = run_dir.with_suffix(".log")
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(command, cwd=PROJECT, stdout=file, stderr=file, check=False)
    if done.returncode == 0:
        return ""
    last = log.read_text(encoding="utf-8").strip().splitlines()[-1:]
    return f"exit status {done.returncode}: {' '.join(last)} ({log})"


def values(run: Run, key: str) -> list[float]:
    """Return the values of `key` in the steps of a run."""
    return [value for row in run if row["step"] and (value := row.get(key)) is not None]


def statistics(run: Run, *, steps: int) -> dict[str, float]:
    """Return the columns of a run. Speed and shares are over its second half, where caches and
    buffer are in their steady state.
    """
    late = [row for row in run if (row["step"] or 0) > steps // 2]
    return {
        "before": run[0][ACCURACY] or 0.0,
        "after": run[-1][ACCURACY] or 0.0,
        "speed": mean(values(late, "rollout/finished_samples_per_s")),
        "off_policy": mean(values(late, "staleness/off_policy_token_frac")),
        "age": max(values(run, "staleness/age_max")),
        "clip": mean(values(late, "loss/clip_frac")),
        "weight": mean(values(late, "loss/is_weight_mean")),
        "ratio_max": max(values(run, "loss/ratio_max")),
        "grad_norm": max(values(run, "loss/grad_norm")),
        "mismatch": max(values(run, "mismatch/logprob_abs_mean")),
    }


def table(args: argparse.Namespace, written: Mapping[str, str]) -> Iterator[str]:
    """Yield lines of Markdown: a row per set-up over its finished seeds, or the row of `written` if
    it has none.
    """
    yield (
        "| set-up | seeds | before | after | ± | samples/s | off-policy | oldest | clipped "
        "| weight | largest ratio | largest gradient | mismatch |"
    )
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    first: Mapping[int, float] = {}
    for name in SET_UPS:
        runs = {seed: read(folder(args, name, seed), steps=args.steps) for seed in args.seeds}
        found = {
            seed: statistics(run, steps=args.steps) for seed, run in runs.items() if run is not None
        }
        first = first or {seed: columns["speed"] for seed, columns in found.items()}
        if found:
            yield row_of(name, found, first)
        elif name in written:
            yield written[name]


def row_of(name: str, found: Mapping[int, Mapping[str, float]], first: Mapping[int, float]) -> str:
    """Return the row of a set-up; its speed is relative to the first set-up that has runs, with the
    same seed.
    """

    def average(key: str) -> float:
        return mean(columns[key] for columns in found.values())

    after = [columns["after"] for columns in found.values()]
    ratios = [columns["speed"] / first[seed] for seed, columns in found.items() if seed in first]
    spread = f"{stdev(after):.3f}" if len(after) > 1 else "–"
    speed = f"{mean(ratios):.2f} ×" if ratios else "–"
    oldest, ratio, norm, mismatch = (
        max(columns[key] for columns in found.values())
        for key in ("age", "ratio_max", "grad_norm", "mismatch")
    )
    return (
        f"| {name} | {len(found)} | {average('before'):.3f} | {average('after'):.3f} | {spread} "
        f"| {speed} | {average('off_policy'):.2f} | {oldest:.0f} | {average('clip'):.4f} "
        f"| {average('weight'):.3f} | {ratio:.1f} | {norm:.2f} | {mismatch:.4f} |"
    )


def write_table(args: argparse.Namespace) -> None:
    """Write the table between its marks, or append it to a document without marks."""
    begin, end = MARKS
    text = args.document.read_text(encoding="utf-8") if args.document.exists() else ""
    if begin not in text:
        text = f"{text.rstrip()}\n\n{begin}\n{end}\n"
    head, _, rest = text.partition(begin)
    present, _, tail = rest.partition(end)
    written = {
        line.strip("| ").split(" | ", 1)[0]: line
        for line in present.splitlines()
        if line.startswith("| ")
    }
    lines = "\n".join(table(args, written))
    args.document.write_text(f"{head}{begin}\n{lines}\n{end}{tail}", encoding="utf-8")


def run_all(args: argparse.Namespace, console: Console) -> int:
    """Run everything that is not done yet, seed by seed; return the number of failures."""
    asked = [(name, seed) for seed in args.seeds for name in SET_UPS if args.only in name]
    failed = 0
    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("runs", total=len(asked))
        for name, seed in asked:
            progress.update(bar, description=f"{name}, seed {seed}")
            run_dir = folder(args, name, seed)
            if read(run_dir, steps=args.steps) is None:
                problem = train(run_dir, SET_UPS[name], seed=seed, steps=args.steps)
                failed += bool(problem)
                console.print(f"{name}, seed {seed}: {problem or 'done'}", markup=False)
                write_table(args)
            progress.advance(bar)
    return failed


def main() -> int:
    """Return 0, or 1 if a run failed."""
    args = arguments()
    console = Console()
    failed = 0 if args.table_only else run_all(args, console)
    write_table(args)
    console.print(f"table: {args.document}", markup=False)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
