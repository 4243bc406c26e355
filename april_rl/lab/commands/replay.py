"""`python -m april_rl replay RUN --step N [settings]`: train a recorded step again."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from april_rl.errors import RunError
from april_rl.start.commands.arguments import Arguments, at_least

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
        usage="python -m april_rl replay RUN --step N [key=value ...] [--json FILE]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("settings", nargs="*", help="key=value, as in training")
    parser.add_argument(
        "--step", type=partial(at_least, 1, int), required=True, metavar="N", help="the step"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    options = parser.parse_intermixed_args(arguments)
    from april_rl.config.store import run_config
    from april_rl.lab.replay.replay import replay, replay_table, responses_table
    from april_rl.start.planning.checks import check_settings
    from april_rl.task.data.tokenizer import load_tokenizer

    path = options.run / "config.yaml"
    config = check_settings(run_config(path))
    changed = None
    if options.settings:
        changed = check_settings(run_config(path, options.settings))
    say = partial(print, flush=True)
    found = replay(options.run, options.step, config=config, changed=changed, say=say)
    print(replay_table(found, options.settings))
    decode = load_tokenizer(config.model.path).decoder()
    print(f"\nresponses that pull most at the update\n{responses_table(found.again, decode)}")
    if options.json is not None:
        _write(options.json, found.figures())
    return 0


def _write(path: Path, figures: object) -> None:
    try:
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"--json {path} cannot be written: {error.strerror}") from error
