"""`python -m april_rl report RUN...`: write report.html into each run directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from april_rl.start.commands.arguments import Arguments


def main(arguments: Sequence[str]) -> int:
    """Write the pages and return the exit status."""
    from april_rl.lab.report.report import write_report

    parser = Arguments(
        prog="python -m april_rl report",
        description="Write report.html into run directories: one file that any browser shows, "
        "without a network. A run writes it at its end.",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run directory")
    parser.add_argument(
        "--plan", type=Path, metavar="FILE", help="what `plan json=FILE` said, beside what it took"
    )
    options = parser.parse_args(arguments)
    for run_dir in options.runs:
        path, advice, traces = write_report(run_dir, plan=options.plan)
        shown = [*advice, *(f"{trace}: open it at ui.perfetto.dev" for trace in traces)]
        print("\n".join([str(path), *(f"  - {line}" for line in shown)]))
    return 0
