"""Draws the reward curve of runs: `python tools/plot.py outputs/tiny_cpu/* --out curve.png`."""

import argparse
import sys
from pathlib import Path

from april_rl.tracking.curve import reward_curve


def metrics_path(run: str) -> Path:
    """Return the metrics.jsonl of a run directory, or the file itself; raise ValueError if there is
    none.
    """
    path = Path(run)
    path = path / "metrics.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give a run directory or its metrics.jsonl")
    return path


def set_ups(runs: list[str]) -> dict[str, list[Path]]:
    """Return the runs by label; without a label, by the name of the parent folder of the run
    directory.
    """
    labelled: dict[str, list[Path]] = {}
    for run in runs:
        name, is_labelled, rest = run.partition("=")
        path = metrics_path(rest if is_labelled else run)
        label = name if is_labelled else path.resolve().parent.parent.name
        labelled.setdefault(label, []).append(path)
    return labelled


def main() -> int:
    """Return 0, or 1 with one line on stderr if a run cannot be read or the picture not written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="[LABEL=]RUN",
        help="run directory or metrics.jsonl; runs with the same label are seeds of one set-up",
    )
    parser.add_argument("--out", type=Path, default=Path("curve.png"), help="the PNG (curve.png)")
    arguments = parser.parse_args()
    try:
        reward_curve(set_ups(arguments.runs), arguments.out)
    except (ValueError, OSError) as error:
        print(f"plot: {error}", file=sys.stderr)
        return 1
    print(arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
