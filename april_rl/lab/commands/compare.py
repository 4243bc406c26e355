"""`python -m april_rl compare RUN_A RUN_B...`: compare runs, or the jobs of a sweep."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import get_terminal_size

from april_rl.lab.commands.output import write_page
from april_rl.start.commands.arguments import Arguments


def main(arguments: Sequence[str]) -> int:
    """Print the table, write the page and return the exit status."""
    from april_rl.lab.report.comparison import compare
    from april_rl.lab.report.comparison_page import comparison_page, comparison_table
    from april_rl.lab.report.planned import planned_beside

    options = _parser().parse_args(arguments)
    comparison = compare(options.runs, accuracy=options.accuracy, evaluation_set=options.set)
    planned = [*planned_beside(comparison.variants, options.plan)] if options.plan else []
    write_page(options.html, comparison_page(comparison, planned))
    width = get_terminal_size().columns if sys.stdout.isatty() else None
    print("\n".join([comparison_table(comparison, width=width), *planned, "", str(options.html)]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Arguments(
        prog="python -m april_rl compare",
        description="Compare runs that differ in some settings and in their seeds. The "
        "synchronous ones are the baseline where there are some.",
    )
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="a run directory, or a folder of run directories such as that of --multirun",
    )
    parser.add_argument(
        "--accuracy", type=float, help="accuracy to reach; default: the highest that all runs reach"
    )
    parser.add_argument("--set", help="the held-out set; default: the first that all runs have")
    parser.add_argument(
        "--plan", type=Path, help="what plan json=FILE wrote: steps are held against it"
    )
    parser.add_argument(
        "--html", type=Path, default=Path("comparison.html"), help="default: comparison.html"
    )
    return parser
