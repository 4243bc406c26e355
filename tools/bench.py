"""Benchmarks; each compares with an alternative in the same run: `tools/bench.py
rollout|step|learner|logprobs|scale|data|pressure|checkpoint`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from april_rl.runtime.process_setup import thread_environment

# Before torch and transformers are imported: threads as in a worker, and only the benchmark's own
# lines in the terminal.
os.environ |= thread_environment(os.cpu_count() or 1)
os.environ |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

from bench_checkpoint import add_checkpoint_arguments, bench_checkpoint
from bench_data import add_data_arguments, bench_data
from bench_learner import add_learner_arguments, bench_learner
from bench_logprobs import add_logprobs_arguments, bench_logprobs
from bench_pressure import add_pressure_arguments, bench_pressure
from bench_rollout import bench_rollout
from bench_rollout_plan import add_rollout_arguments
from bench_scale import add_scale_arguments, bench_scale
from bench_start import say_start
from bench_step import add_step_arguments, bench_step


class Benchmark(NamedTuple):
    """A subcommand: its options, what it runs, and its default duration in minutes."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Sequence[Mapping[str, object]]]
    minutes: int  # measured on two idle cores


BENCHMARKS = {
    "rollout": Benchmark(
        "samples/s: synchronous, one-shot, refill, and the limit",
        add_rollout_arguments,
        bench_rollout,
        minutes=4,
    ),
    "step": Benchmark(
        "trained tokens/s end to end, and where the time goes",
        add_step_arguments,
        bench_step,
        minutes=10,
    ),
    "learner": Benchmark(
        "tokens/s of an update: learner, plain loop, padded batches",
        add_learner_arguments,
        bench_learner,
        minutes=10,
    ),
    "logprobs": Benchmark(
        "memory, time and error of log-probabilities without the logits",
        add_logprobs_arguments,
        bench_logprobs,
        minutes=5,
    ),
    "scale": Benchmark(
        "the controller's own time with 1 to 512 engines",
        add_scale_arguments,
        bench_scale,
        minutes=9,
    ),
    "data": Benchmark(
        "time and memory to load a prompt set, by its number of rows",
        add_data_arguments,
        bench_data,
        minutes=3,
    ),
    "checkpoint": Benchmark(
        "how long training stops for a checkpoint, against a save that it waits for",
        add_checkpoint_arguments,
        bench_checkpoint,
        minutes=2,
    ),
    "pressure": Benchmark(
        "samples/s with a KV cache that is too small, and what preemption throws away",
        add_pressure_arguments,
        bench_pressure,
        minutes=3,
    ),
}


def main() -> None:
    """Print how long a benchmark will take, run it, print its table and write its rows."""
    args = arguments()
    benchmark = BENCHMARKS[args.command]
    say_start(benchmark.minutes)
    rows = benchmark.run(args)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        print(f"rows written to {args.json}")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line, or of `words`."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, benchmark in BENCHMARKS.items():
        command = commands.add_parser(name, help=benchmark.summary)
        command.add_argument("--json", type=Path, help="write the rows here")
        benchmark.add_arguments(command)
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
