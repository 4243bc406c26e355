"""Benchmarks; each compares with an alternative in the same run: `tools/bench.py rollout|step`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

import psutil

from april_rl.training.runtime.process_setup import thread_environment

# This comes before torch and transformers are imported: it sets the threads of a worker, and leaves
# only the benchmark's own lines in the terminal.
os.environ |= thread_environment(os.cpu_count() or 1)
os.environ |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

from bench import rollout, step

MUCH_OF_A_CORE = 0.2  # the services of an idle machine use less


def main() -> None:
    """Print how long a benchmark takes, run it, print its table and write its rows."""
    args = arguments()
    print(f"{args.minutes} minutes on two idle cores, unless options ask for more", flush=True)
    busy_cores = psutil.cpu_percent(interval=1.0) / 100 * (os.cpu_count() or 1)
    if busy_cores > MUCH_OF_A_CORE:
        print(
            f"WARNING: other processes keep {busy_cores:.1f} cores busy. Times will be longer than "
            "they should be, and ratios uncertain: end that work, or measure again later.",
            flush=True,
        )
    rows = args.run(args)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        print(f"rows written to {args.json}")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line, or of `words`."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for module, minutes in ((rollout, 4), (step, 10)):
        summary, name = (module.__doc__ or "").split("\n\n")[0], module.__name__.split(".")[1]
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("--json", type=Path, help="write the rows here")
        command.set_defaults(run=module.run, minutes=minutes)
        module.add_arguments(command)
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
