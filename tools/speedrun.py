"""A race on two CPU cores: SmolLM2-135M learns tasks of reasoning_gym until a held-out accuracy.

    make speedrun                                  # the recipe speedrun
    make speedrun ARGS="+schedule=synchronous"     # with settings of yours, or +recipe=YOURS

Fetches the model (90 MB), trains three seeds and prints their row for docs/speedrun.md.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from statistics import fmean, stdev

from smollm2 import fetch

from april_rl.lab.report.compared_run import Budget, evaluations, first_cost_to
from april_rl.lab.report.run_files import RunFiles, read_run
from april_rl.run.tracking.labels import versions

PROJECT = Path(__file__).resolve().parents[1]
MODEL = PROJECT / "build" / "speedrun" / "smollm2"
TARGET = Budget(samples=0, seconds=0, accuracy=0.3, evaluation_set="held_out")
_STUDENT = 4.303  # the two-sided 95 % quantile for three values


def main(settings: Sequence[str]) -> int:
    """Run all seeds and print their row; return the exit status."""
    if {"-h", "--help"} & {*settings}:
        print(__doc__)
        return 0
    if not MODEL.is_dir():
        fetch(MODEL)
    has_recipe = any(word.startswith("+recipe=") for word in settings)
    folder = PROJECT / "outputs" / "speedrun" / time.strftime("%Y-%m-%d_%H-%M-%S")
    train = [sys.executable, "-m", "april_rl.train", "--multirun", f"hydra.sweep.dir={folder}"]
    train += [f"model.path={MODEL}", "seed=0,1,2"]
    train += [*([] if has_recipe else ["+recipe=speedrun"]), *settings]
    if status := subprocess.run(train, cwd=PROJECT, check=False).returncode:
        return status
    runs = [read_run(path.parent) for path in sorted(folder.glob("*/metrics.jsonl"))]
    print(f"\n{row(runs, ' '.join(settings) or '+recipe=speedrun')}")
    return 0


def row(runs: Sequence[RunFiles], settings: str) -> str:
    """Return a row of the board: what the runs needed until the target, and where they ended."""
    costs = []
    for name, unit, digits in (("seconds", 60, 1), ("samples", 1, 0), ("tokens", 1000, 0)):
        found = [first_cost_to(run, TARGET, attrgetter(name)) for run in runs]
        reached = [cost / unit for cost in found if cost is not None]
        missing = len(runs) - len(reached)
        costs.append(f"{missing} never" if missing else over_seeds(reached, digits))
    ends = [evaluations(run, TARGET.evaluation_set)[-1].accuracy for run in runs]
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    minutes = over_seeds([sum(v for _, v in r.series("time/step_s")) / 60 for r in runs], 1)
    where = f"{versions().get('commit', '')[:8]}, {names[0]}, {len(names)} cores"
    return f"| {' | '.join([*costs, over_seeds(ends, 3), minutes, f'`{settings}`', where])} |"


def over_seeds(values: Sequence[float], digits: int) -> str:
    """Return the mean of three values, and half its 95 % interval."""
    half = _STUDENT * stdev(values) / len(values) ** 0.5
    return f"{fmean(values):,.{digits}f} ± {half:,.{digits}f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
