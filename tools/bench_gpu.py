"""The learner alone on one device, at the dimensions of a real model with random weights; its table
is markdown.

`tools/bench_gpu.py --size qwen3_0.6b` on a GPU (qwen3_4b wants one of 80 GB and
--activation-checkpointing); on a CPU it runs at small size. What is measured:

attention: packed attention against one SDPA call a sequence in the same precision, and both against
the same in float32: largest error of the output, relative error of the gradients, time forward and
backward.
logprobs: peak memory and time of the output layer against the whole float32 softmax.
update: tokens per second (prompt and response) of an optimizer step, and model FLOPs utilisation
(PaLM, arXiv 2204.02311, appendix B): FLOPs of the step ÷ its time ÷ peak. FLOPs are those that the
mathematics asks for, backward twice those of forward: 6 · weights of the layers' matrices a token;
6 · V · H a response token; 6 · layers · query heads · head dimension · l² a sequence of l tokens
(causal: half of all pairs). What is computed a second time to save memory does not count. On a
device without a known peak the FLOP/s are compared with those of a matrix product.
plain: the same step by the hand-written loop of `tools/bench.py learner`.
offload: moving weights and optimizer state to the host and back.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from april_rl.runtime.process_setup import thread_environment

os.environ |= thread_environment(os.cpu_count() or 1)
os.environ |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

import torch
from bench_attention import attention_lines
from bench_device import FROM_DATA_SHEET, name_of, peak_tflops, pick_device, timed
from bench_logprobs import METHODS, Size, cost
from bench_loops import packed_loop
from bench_memory import PeakMemory, in_fresh_process
from bench_models import SIZES, ModelSize, write_random_model
from bench_modes import CappedLognormal
from bench_rows import Work, group_of_one, load_config, make_rows, num_tokens

from april_rl.batch.packing import MicroBatch
from april_rl.config import TrainConfig
from april_rl.learner.learner import Learner
from april_rl.runtime.worker_parts import build_learner

MFU = "model FLOPs utilisation"
PARTS = ("attention", "logprobs", "update", "plain", "offload")
_WORK = {  # model, groups of 8 samples, median and largest response, tokens of a row
    "cpu": ("small", 2, 64.0, 640, 2048),
    "accelerator": ("qwen3_0.6b", 8, 1024.0, 8192, 16_384),
}


class Line(NamedTuple):
    """One row of the table."""

    part: str
    quantity: str
    value: str
    number: float | None = None  # of --json, in the unit that `value` shows


class Bench(NamedTuple):
    """Settings of every part."""

    device: torch.device
    size: ModelSize
    config: TrainConfig
    rows: Sequence[MicroBatch]
    rounds: int
    peak_tflops: float
    is_known_peak: bool


def main() -> None:
    """Run the parts that the command line names and write the table."""
    args = _arguments()
    device = pick_device(args.device)
    kind = "cpu" if device.type == "cpu" else "accelerator"
    names = ("size", "num_groups", "median_tokens", "max_response_tokens", "max_tokens")
    for name, default in zip(names, _WORK[kind], strict=True):
        if getattr(args, name) is None:
            setattr(args, name, default)
    peak, source = peak_tflops(device, args.peak_tflops)
    size = SIZES[args.size]
    lines = [Line("device", name_of(device), f"{peak:,.1f} TFLOP/s bfloat16, {source}")]
    with tempfile.TemporaryDirectory() as folder, group_of_one(device):
        started = time.perf_counter()
        write_random_model(Path(folder), size)
        lines.append(Line("model", args.size, f"written in {_seconds(started):.1f} s"))
        config = load_config(Path(folder), *_overrides(args))
        learner = build_learner(config, device=device.type)
        lines.append(Line("model", "parameters", f"{learner.num_parameters:,}"))
        rows = make_rows(
            config, learner, _work(args), vocabulary=size.vocabulary, hidden_size=size.hidden_size
        )
        is_known = source == FROM_DATA_SHEET or args.peak_tflops is not None
        bench = Bench(device, size, config, rows, args.rounds, peak, is_known)
        lines += _shape_lines(rows)
        if "update" in args.parts:
            lines += update_lines(bench, learner)
        if "offload" in args.parts:
            lines += offload_lines(bench, learner)
        del learner
        if "plain" in args.parts:
            lines += plain_lines(bench)
    lengths = rows[0].lengths
    if "attention" in args.parts:
        found = attention_lines(size, lengths, device=device, rounds=args.rounds)
        lines += [Line("attention", *pair) for pair in found]
    if "logprobs" in args.parts:
        lines += logprob_lines(size, len(rows[0].token_ids), device=device)
    _write(lines, args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--size", choices=SIZES)
    parser.add_argument("--num-groups", type=int, help="number of groups of 8 samples")
    parser.add_argument("--prompt-tokens", type=int, default=24)
    parser.add_argument(
        "--median-tokens", type=float, help="median of the response lengths (lognormal)"
    )
    parser.add_argument("--sigma", type=float, default=1.0, help="standard deviation of log length")
    parser.add_argument("--max-response-tokens", type=int)
    parser.add_argument("--max-tokens", type=int, help="tokens of a packed row")
    parser.add_argument("--activation-checkpointing", action="store_true")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; medians are shown")
    parser.add_argument("--peak-tflops", type=float, help="peak of the device, dense bfloat16")
    parser.add_argument("--output", type=Path, help="write the table here too")
    parser.add_argument("--json", type=Path, help="write part, quantity, value, number here")
    return parser.parse_args()


def _overrides(args: argparse.Namespace) -> Iterator[str]:
    yield f"rollout.max_response_tokens={args.max_response_tokens}"
    yield f"learner.max_tokens={args.max_tokens}"
    yield f"learner.activation_checkpointing={args.activation_checkpointing}"
    yield "learner.offload=all"


def _work(args: argparse.Namespace) -> Work:
    return Work(
        num_groups=args.num_groups,
        group_size=8,
        prompt_tokens=args.prompt_tokens,
        length_of=CappedLognormal.of(args),
    )


def step_flops(size: ModelSize, rows: Sequence[MicroBatch]) -> float:
    """Return the model FLOPs of an optimizer step, by the formula in this module's docstring."""
    responses = sum(int(row.response_mask.sum()) for row in rows)
    pairs = sum(length**2 for row in rows for length in row.lengths)
    of_layers = size.num_layers * size.layer_parameters * num_tokens(rows)
    of_head = size.vocabulary * size.hidden_size * responses
    of_attention = size.num_layers * size.num_heads * size.head_dim * pairs
    return 6.0 * (of_layers + of_head + of_attention)


def update_lines(bench: Bench, learner: Learner) -> list[Line]:
    """Measure the learner's step after a warm-up; peak memory is that of the first step, without
    weights.
    """
    with PeakMemory(bench.device) as peak:
        learner.update([bench.rows])
    lines = _step_lines(bench, "update", lambda: learner.update([bench.rows]))
    shown = f"{peak.mib:,.0f} MiB"
    return [*lines, Line("update", "peak memory above the weights", shown, peak.mib)]


def plain_lines(bench: Bench) -> list[Line]:
    """Measure the step of the hand-written loop."""
    loop = packed_loop(bench.config, bench.rows, device=bench.device)
    loop.update()
    return _step_lines(bench, "plain", loop.update)


def _step_lines(bench: Bench, part: str, step: Callable[[], Any]) -> list[Line]:
    seconds = median(timed(step, bench.device) for _ in range(bench.rounds))
    tflops = step_flops(bench.size, bench.rows) / seconds / 1e12
    tokens_per_s, of_peak = num_tokens(bench.rows) / seconds, 100 * tflops / bench.peak_tflops
    compared = MFU if bench.is_known_peak else "of a matrix product"
    return [
        Line(part, "time", f"{seconds:.3f} s", seconds),
        Line(part, "tokens per second", f"{tokens_per_s:,.0f}", tokens_per_s),
        Line(part, "model TFLOP/s", f"{tflops:.3g}", tflops),
        Line(part, compared, f"{of_peak:.1f} %", of_peak),
    ]


def offload_lines(bench: Bench, learner: Learner) -> list[Line]:
    """Measure weights and moments to the host and back; the first time, which allocates host
    memory, is listed separately.
    """
    learner.reload()
    first = timed(learner.offload, bench.device)
    gib = learner.num_parameters * 12 / 2**30
    pairs = []
    for _ in range(bench.rounds):
        reload_s = timed(learner.reload, bench.device)
        pairs.append((timed(learner.offload, bench.device), reload_s))
    learner.reload()
    shown = [Line("offload", "weights and moments", f"{gib:.2f} GiB", gib)]
    shown.append(Line("offload", "first time", f"{first:.3f} s", first))
    for way, column in zip(("to the host", "back"), zip(*pairs, strict=True), strict=True):
        seconds = median(column)
        text = f"{seconds:.3f} s, {gib / seconds:.1f} GiB/s"
        shown.append(Line("offload", way, text, seconds))
    return shown


def logprob_lines(size: ModelSize, count: int, *, device: torch.device) -> list[Line]:
    """Measure memory and time for as many tokens as a row has; on CPU in new processes."""
    layer = Size(num_tokens=count, hidden_size=size.hidden_size, vocabulary=size.vocabulary)
    found = {
        name: (
            in_fresh_process(cost, layer, name, device=device)
            if device.type == "cpu"
            else cost(layer, name, device=device)
        )
        for name in METHODS
    }
    lines = [
        Line("logprobs", f"{name}, {count:,} tokens", f"{peak:,.0f} MiB, {seconds:.3f} s")
        for name, (peak, seconds) in found.items()
    ]
    (naive_mib, naive_s), (mib, seconds) = found["naive"], found["chunked"]
    ratios = f"{mib / naive_mib:.3f} of the memory, {seconds / naive_s:.2f} of the time"
    return [*lines, Line("logprobs", "chunked ÷ naive", ratios)]


def _shape_lines(rows: Sequence[MicroBatch]) -> list[Line]:
    lengths = sorted(length for row in rows for length in row.lengths)
    return [
        Line("step", "sequences in rows", f"{len(lengths)} in {len(rows)}"),
        Line("step", "tokens", f"{num_tokens(rows):,}"),
        Line("step", "median, longest sequence", f"{lengths[len(lengths) // 2]}, {lengths[-1]}"),
    ]


def _seconds(started: float) -> float:
    return time.perf_counter() - started


def _write(lines: Sequence[Line], args: argparse.Namespace) -> None:
    text = "| part | quantity | value |\n|---|---|--:|\n"
    text += "".join(f"| {line.part} | {line.quantity} | {line.value} |\n" for line in lines)
    print(text)
    if args.output is not None:
        args.output.write_text(text, encoding="utf-8")
    if args.json is not None:
        rows = [line._asdict() for line in lines]
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
