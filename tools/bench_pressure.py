"""What a KV cache that is too small costs: vLLM's own admission against headroom for running
samples, and asynchronous against synchronous scheduling.

Every engine finishes the same samples, all handed over at once, with a cache of `--cache` of what
its slots would want at the mean length. Engines take turns in rounds; the table shows medians.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from bench_modes import CappedLognormal
from rich.console import Console
from rich.progress import track
from rich.table import Table

from april_rl.types import Request, SampleId

if TYPE_CHECKING:
    from april_rl.engine.vllm_engine import VllmEngine

# The benchmark's model is the tests' random one.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

HEADROOMS = (0.0, 0.05, 0.1, 0.2)
_PROMPT_TOKENS = 16
_KV_BYTES_PER_TOKEN = 2 * 2 * 2 * 32 * 4  # (key, value) · layers · heads · width · bytes: float32


def add_pressure_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pressure`."""
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--median-tokens", type=float, default=64.0, help="median response length")
    parser.add_argument("--sigma", type=float, default=1.0, help="standard deviation of log length")
    parser.add_argument("--max-response-tokens", type=int, default=640)
    parser.add_argument("--cache", type=float, default=0.25, help="KV cache ÷ what the slots need")


class _Run(NamedTuple):
    """Results of one engine on the common work."""

    samples_per_s: float
    steps: int
    running: float  # on average
    preempted: int
    thrown_away: float  # tokens, for each generated one


def bench_pressure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every engine, print the table; returns its rows."""
    length_of = CappedLognormal.of(args)
    samples = [SampleId(i, 0) for i in range(args.samples)]
    mean_tokens = _PROMPT_TOKENS + sum(map(length_of, samples)) / len(samples)
    kinds = [(share, headroom, False) for share in (args.cache,) for headroom in HEADROOMS]
    kinds += [(4.0, 0.1, False), (4.0, 0.1, True)]  # enough for everything
    with tempfile.TemporaryDirectory() as folder:
        engines = [
            _engine(Path(folder), args, mean_tokens * share, headroom, is_async=is_async)
            for share, headroom, is_async in kinds
        ]
        turns = [i for _ in range(args.rounds + 1) for i in range(len(engines))]
        runs: list[list[_Run]] = [[] for _ in engines]
        for i in track(turns, description="measuring"):
            runs[i].append(_run(engines[i], samples, length_of))
    rows = [
        {
            "cache": share,
            "headroom": headroom,
            "async_scheduling": is_async,
            **each[-1]._asdict(),  # counts are the same in every round
        }
        | {"samples_per_s": median(run.samples_per_s for run in each[1:])}
        for (share, headroom, is_async), each in zip(kinds, runs, strict=True)
    ]
    _show(rows, mean_tokens=mean_tokens)
    return rows


def _engine(
    folder: Path, args: argparse.Namespace, tokens_a_slot: float, headroom: float, *, is_async: bool
) -> VllmEngine:
    from tiny_models import write_tiny_qwen3

    from april_rl.config.choices import ComputeDtype
    from april_rl.config.engine import EngineConfig
    from april_rl.engine.vllm_engine import VllmEngine
    from april_rl.runtime.layout import precision
    from april_rl.runtime.preflight import pick_device

    write_tiny_qwen3(folder)
    config = EngineConfig(
        dtype=precision(ComputeDtype.auto, pick_device("auto")),
        max_batched_tokens=1024,
        kv_cache_gib=tokens_a_slot * args.slots * _KV_BYTES_PER_TOKEN / 2**30,
        gpu_memory_utilization=0.5,
        cuda_graphs=False,
        kv_cache_headroom=headroom,
        async_scheduling=is_async,
    )
    return VllmEngine(
        config,
        model_path=str(folder),
        seed=0,
        temperature=1.0,
        max_model_len=_PROMPT_TOKENS + args.max_response_tokens,
        max_num_seqs=args.slots,
        keeps_parked=False,
        sleeps=True,
        stop_tokens=(),
    )


def _run(engine: VllmEngine, samples: list[SampleId], length_of: CappedLognormal) -> _Run:
    """Finish all samples, as many at a time as the slots and the cache allow."""
    requests = [
        Request(
            sample_id=sample_id,
            prompt_token_ids=tuple(3 + (sample_id.prompt_id * 13 + j) % 90 for j in range(16)),
            start=0,
            max_tokens=length_of(sample_id),
            seed=sample_id.prompt_id,
        )
        for sample_id in samples
    ]
    started = time.perf_counter()
    tick = engine.advance(requests, slots=len(samples), max_steps=10**9)
    return _Run(
        samples_per_s=len(samples) / (time.perf_counter() - started),
        steps=tick.engine_steps,
        running=tick.slot_steps / tick.engine_steps,
        preempted=tick.preempted_samples,
        thrown_away=tick.preempted_tokens / tick.generated_tokens,
    )


def _show(rows: list[dict[str, Any]], *, mean_tokens: float) -> None:
    table = Table(title=f"a full KV cache; {mean_tokens:.0f} tokens a sample on average")
    heads = ("cache ÷ need", "headroom", "async", "samples/s", "÷ no headroom", "steps", "running")
    for head in (*heads, "preempted", "thrown away ÷ generated"):
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(
            f"{row['cache']:g}",
            f"{row['headroom']:g}",
            "yes" if row["async_scheduling"] else "",
            f"{row['samples_per_s']:.1f}",
            f"{row['samples_per_s'] / rows[0]['samples_per_s']:.2f}",
            str(row["steps"]),
            f"{row['running']:.1f}",
            str(row["preempted"]),
            f"{row['thrown_away']:.2f}",
        )
    Console(width=125).print(table)
    on, off = rows[-1]["samples_per_s"], rows[-2]["samples_per_s"]
    print(f"asynchronous scheduling: {on / off:.2f} × synchronous, with room for everything")
