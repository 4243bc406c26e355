"""`python -m april_rl why RUN`: what went wrong in a run, and what explains it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from textwrap import fill

from april_rl.lab.commands.output import write_figures, write_page
from april_rl.lab.report.run_files import read_run
from april_rl.start.commands.arguments import Arguments

_DESCRIPTION = """\
Finds the first metric that left the band of its own past, and which explanations remove that when
the recorded step is trained again with them. The run needs trainer.record_steps.

  python -m april_rl.train +recipe=tiny_cpu trainer.record_steps=all checkpoint.every_steps=10
  python -m april_rl why outputs/tiny_cpu/... --html why.html
"""


def main(arguments: Sequence[str]) -> int:
    """Explain as the command line asks, print the answer and return the exit status."""
    parser = Arguments(
        prog="python -m april_rl why",
        usage="python -m april_rl why RUN [--html FILE] [--json FILE]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures")
    options = parser.parse_args(arguments)
    run = read_run(options.run)
    from april_rl.lab.why.page import why_page
    from april_rl.lab.why.why import why

    answer = why(run, say=partial(print, flush=True))
    print("", *(fill(line, 100, subsequent_indent="  ") for line in answer.lines()), sep="\n")
    if options.html is not None:
        write_page(options.html, why_page(run, answer))
    if options.json is not None:
        write_figures(options.json, answer.figures())
    return 0
