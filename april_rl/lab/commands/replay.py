"""`python -m april_rl replay RUN --step N [settings]`: train a recorded step again."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from april_rl.lab.commands.output import write_figures, write_page
from april_rl.start.commands.arguments import Arguments

_DESCRIPTION = """\
Trains a step again, in this process and without an engine: first with the run's settings, to see
that it is equal, then with others beside them. The run needs trainer.record_steps and a checkpoint
before the step; steps in between are trained again.

  python -m april_rl.train +recipe=tiny_cpu trainer.record_steps=all
  python -m april_rl replay outputs/tiny_cpu/... --step 12 algorithm.loss=gspo
"""


def main(arguments: Sequence[str]) -> int:
    """Replay as the command line asks, print the metrics and return the exit status."""
    parser = Arguments(
        prog="python -m april_rl replay",
        usage="python -m april_rl replay RUN --step N [key=value ...] [--html FILE] [--json FILE]\n"
        "       python -m april_rl replay RUN --steps A-B [key=value ...]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("settings", nargs="*", help="key=value, as in training")
    steps = parser.add_mutually_exclusive_group(required=True)
    steps.add_argument("--step", type=_steps, dest="steps", metavar="N", help="the step")
    steps.add_argument(
        "--steps",
        type=_steps,
        metavar="A-B",
        help="steps in a row: other settings go on with "
        "their own weights and the run's samples, which are older and older for them",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    options = parser.parse_intermixed_args(arguments)
    from april_rl.config.store import run_config
    from april_rl.lab.replay.page import replay_page
    from april_rl.lab.replay.replay import replay, replay_table, responses_table
    from april_rl.start.planning.checks import check_settings
    from april_rl.task.data.tokenizer import load_tokenizer

    path = options.run / "config.yaml"
    config = check_settings(run_config(path))
    changed = None
    if options.settings:
        changed = check_settings(run_config(path, options.settings))
    say = partial(print, flush=True)
    found = replay(options.run, options.steps, config=config, changed=changed, say=say)
    print(replay_table(found, options.settings))
    decode = load_tokenizer(config.model.path).decoder()
    print(f"\nresponses that pull most at the update\n{responses_table(found.again, decode)}")
    if options.html is not None:
        page = replay_page(found, settings=options.settings, decode=decode)
        write_page(options.html, page)
    if options.json is not None:
        write_figures(options.json, found.figures())
    return 0


def _steps(text: str) -> range:
    """Return the steps of `N` or `A-B`; argparse names the option for a ValueError."""
    first, _, last = text.partition("-")
    found = range(int(first), int(last or first) + 1)
    if not found or found[0] < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a step from 1 on, or two as in 400-412")
    return found
