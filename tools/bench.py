"""Benchmarks, each against something in the same run: `tools/bench.py rollout|step`."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from april_rl.runtime.threads import thread_environment

# Before torch and transformers are imported: threads as in a worker, and only the benchmark's own
# lines in the terminal.
os.environ |= thread_environment(os.cpu_count() or 1)
os.environ |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

from bench_rollout import add_rollout_arguments, bench_rollout
from bench_step import add_step_arguments, bench_step


def main() -> None:
    """Run one benchmark, print its table, write its rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, add, what in (
        (
            "rollout",
            add_rollout_arguments,
            "samples/s: synchronous, one-shot, refill, and the limit",
        ),
        ("step", add_step_arguments, "trained tokens/s end to end, and where the time goes"),
    ):
        command = commands.add_parser(name, help=what)
        command.add_argument("--json", type=Path, help="write the rows here")
        add(command)
    args = parser.parse_args()
    rows = bench_rollout(args) if args.command == "rollout" else bench_step(args)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        print(f"rows written to {args.json}")


if __name__ == "__main__":
    main()
