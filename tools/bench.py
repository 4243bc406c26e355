"""Benchmarks, each against something in the same run:
`tools/bench.py rollout|step|learner|logprobs|scale|data|pressure`.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from april_rl.runtime.process_setup import thread_environment

# Before torch and transformers are imported: threads as in a worker, and only the benchmark's own
# lines in the terminal.
os.environ |= thread_environment(os.cpu_count() or 1)
os.environ |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

from bench_data import add_data_arguments, bench_data
from bench_learner import add_learner_arguments, bench_learner
from bench_logprobs import add_logprobs_arguments, bench_logprobs
from bench_pressure import add_pressure_arguments, bench_pressure
from bench_rollout import add_rollout_arguments, bench_rollout
from bench_scale import add_scale_arguments, bench_scale
from bench_step import add_step_arguments, bench_step

COMMANDS = {
    "rollout": (
        add_rollout_arguments,
        bench_rollout,
        "samples/s: synchronous, one-shot, refill, and the limit",
    ),
    "step": (
        add_step_arguments,
        bench_step,
        "trained tokens/s end to end, and where the time goes",
    ),
    "learner": (
        add_learner_arguments,
        bench_learner,
        "tokens/s of an update: learner, plain loop, padded batches",
    ),
    "logprobs": (
        add_logprobs_arguments,
        bench_logprobs,
        "memory, time and error of log-probabilities without the logits",
    ),
    "scale": (
        add_scale_arguments,
        bench_scale,
        "the controller's own time with 1 to 512 engines",
    ),
    "data": (
        add_data_arguments,
        bench_data,
        "time and memory to load a prompt set, by its number of rows",
    ),
    "pressure": (
        add_pressure_arguments,
        bench_pressure,
        "samples/s with a KV cache that is too small, and what preemption throws away",
    ),
}


def main() -> None:
    """Run one benchmark, print its table, write its rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (add, _, what) in COMMANDS.items():
        command = commands.add_parser(name, help=what)
        command.add_argument("--json", type=Path, help="write the rows here")
        add(command)
    args = parser.parse_args()
    rows = COMMANDS[args.command][1](args)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        print(f"rows written to {args.json}")


if __name__ == "__main__":
    main()
