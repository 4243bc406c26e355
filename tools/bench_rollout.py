"""How fast samples are finished: synchronous, one-shot and refill at several over-sampling factors,
and the limit.

The real collector drives the real engine in this process. Response lengths follow a lognormal law:
a sample's length is drawn from its id, so every mode is given the same work. Modes take turns in
rounds, because the machine's speed drifts, and the table shows medians over rounds with the
smallest and the largest value. The *limit* is an engine that is never short of work and never
aborted, with the same number of samples in flight.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from april_rl.rollout.collector import Collector
from april_rl.rollout.seeds import request_seed
from april_rl.rollout.serial import SerialEngines, SingleEngine
from april_rl.types import Completion, Prompt, Request, Sample, SampleId, Score, Tick

# The benchmark's model is the tests' random one.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

FACTORS = (1.0, 1.5, 2.0, 3.0)
_PROMPT_TOKENS = 12
_PREFILL_STEPS = 12  # enough to put every sample of the limit back before the clock starts
_LIMIT_STEP_S = 1.5  # a slice of the limit lasts about as long as one of the collector


def add_rollout_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `rollout`."""
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps of each mode in a round")
    parser.add_argument("--warmup-steps", type=int, default=4, help="of each mode, not counted")
    parser.add_argument("--num-groups", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--median-tokens", type=float, default=100.0, help="of the length law")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the length law's logarithm")
    parser.add_argument("--max-response-tokens", type=int, default=1024)
    parser.add_argument("--tick-steps", type=int, default=8)
    parser.add_argument("--factors", type=float, nargs="+", default=FACTORS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthLaw:
    """Lognormal response lengths, a function of the sample's id."""

    median_tokens: float
    sigma: float
    max_tokens: int

    def __call__(self, sample_id: SampleId) -> int:
        """Response tokens of a sample, 1 … max_tokens."""
        rng = np.random.default_rng((sample_id.prompt_id, sample_id.index))
        length = self.median_tokens * math.exp(self.sigma * rng.standard_normal())
        return int(min(max(length, 1), self.max_tokens))


class LawfulEngine:
    """An engine whose samples end when the length law says so."""

    def __init__(self, engine: SingleEngine, law: LengthLaw) -> None:
        """`engine` must not stop by itself."""
        self._engine, self._law = engine, law

    def advance(self, submit: Sequence[Request], *, slots: int, max_steps: int) -> Tick:
        """As the engine does."""
        lawful = [replace(r, max_tokens=self._law(r.sample_id) - r.start) for r in submit]
        return self._engine.advance(lawful, slots=slots, max_steps=max_steps)

    def abort(self) -> list[Completion]:
        """As the engine does."""
        return self._engine.abort()


class Prompts:
    """Endless random prompts ."""

    def __init__(self, vocabulary: int) -> None:
        """Token ids 4 … vocabulary - 1."""
        self._next, self._vocabulary = 0, vocabulary

    def take(self) -> Prompt:
        """The next prompt."""
        rng = np.random.default_rng((7, self._next))
        ids = tuple(int(t) for t in rng.integers(4, self._vocabulary, size=_PROMPT_TOKENS))
        prompt = Prompt(id=self._next, token_ids=ids, text="", answer="", source="benchmark")
        self._next += 1
        return prompt


class InstantScorer:
    """A reward that costs nothing: what is measured here is generation."""

    def __init__(self) -> None:
        """Nothing submitted."""
        self._scores: list[Score] = []

    def submit(self, sample: Sample) -> None:
        """Score by place in the group, so that every group has signal."""
        self._scores.append(
            Score(sample_id=sample.id, value=float(sample.index % 2), outcome="scored")
        )

    def collect(self, timeout_s: float | None) -> list[Score]:  # noqa: ARG002 (never waits)
        """All of them."""
        scores, self._scores = self._scores, []
        return scores


@dataclass(slots=True, kw_only=True)
class Slice:
    """What one mode did in one round."""

    time_s: float = 0.0
    finished: int = 0
    trained: int = 0
    generated: int = 0
    reprefill: int = 0
    controller_s: float = 0.0
    occupancy: float = 0.0


class CollectorMode:
    """Synchronous, one-shot or refill: the real collector, its buffer kept over all rounds."""

    def __init__(
        self, args: argparse.Namespace, engine: LawfulEngine, *, factor: float, refill: bool
    ) -> None:
        """A collector of its own on the shared engine."""
        self.factor = factor
        self.name = "refill" if refill else "synchronous" if factor == 1 else "one-shot"
        self._needed = args.num_groups * args.group_size
        self._version = 0
        self._collector = Collector(
            SerialEngines([engine]),
            InstantScorer(),
            Prompts(90),
            num_groups=args.num_groups,
            group_size=args.group_size,
            over_sampling_factor=factor,
            refill=refill,
            max_response_tokens=args.max_response_tokens,
            temperature=1.0,
            max_staleness=8,
            finish_stale=True,
            keep=lambda scored: True,  # noqa: ARG005
            max_rejected_groups=0,
            tick_steps=args.tick_steps,
            abort_timeout_s=60.0,
            tick_timeout_s=60.0,
            deterministic=False,
            seed=0,
        )

    def run(self, steps: int, between: Callable[[], None]) -> Slice:
        """`steps` steps, with what a weight sync does to the engine's cache in between, untimed."""
        done = Slice()
        for _ in range(steps):
            between()
            stats = self._collector.collect(self._version).stats
            self._version += 1
            done.time_s += stats.time_s
            done.finished += stats.finished_samples
            done.trained += self._needed
            done.generated += stats.generated_tokens
            done.reprefill += stats.reprefill_tokens
            done.controller_s += stats.time_s - stats.waited_s
            done.occupancy += stats.in_flight_mean / stats.num_slots / steps
        return done


class Limit:
    """An engine never short of work and never aborted, with `factor`·N·G samples in flight.

    Other modes use the engine in between, so its samples are put back before the clock starts.
    """

    name = "limit"

    def __init__(self, args: argparse.Namespace, engine: LawfulEngine, *, factor: float) -> None:
        """Samples in flight are kept from round to round."""
        self.factor = factor
        self._engine, self._args = engine, args
        self._slots = round(factor * args.num_groups * args.group_size)
        self._prompts, self._held = Prompts(90), deque[Sample]()

    def run(self, steps: int, between: Callable[[], None]) -> Slice:
        """About as long as `steps` steps of a collector take."""
        between()
        live: dict[SampleId, Sample] = {}
        self._advance(live, _PREFILL_STEPS)
        ticks: list[Tick] = []
        started = time.perf_counter()
        while time.perf_counter() - started < steps * _LIMIT_STEP_S:
            ticks.append(self._advance(live, self._args.tick_steps))
        time_s = time.perf_counter() - started
        for completion in self._engine.abort():
            sample = live[completion.sample_id]
            self._held.append(sample.extended(completion) if completion.token_ids else sample)
        slot_steps = sum(tick.slot_steps for tick in ticks)
        engine_steps = sum(tick.engine_steps for tick in ticks)
        finished = sum(len(tick.finished) for tick in ticks)
        return Slice(
            time_s=time_s,
            finished=finished,
            trained=finished,
            generated=sum(tick.generated_tokens for tick in ticks),
            occupancy=slot_steps / engine_steps / self._slots,
        )

    def _advance(self, live: dict[SampleId, Sample], max_steps: int) -> Tick:
        """A tick with the queue filled up before it."""
        submit = []
        while len(live) < self._slots + self._slots // 4:
            if not self._held:
                prompt = self._prompts.take()
                indices = range(self._args.group_size)
                self._held.extend(Sample(prompt=prompt, index=i) for i in indices)
            sample = self._held.popleft()
            live[sample.id] = sample
            submit.append(self._request(sample))
        tick = self._engine.advance(submit, slots=self._slots, max_steps=max_steps)
        for completion in tick.finished:
            del live[completion.sample_id]
        return tick

    def _request(self, sample: Sample) -> Request:
        return Request(
            sample_id=sample.id,
            token_ids=sample.prompt.token_ids + sample.token_ids,
            start=sample.num_tokens,
            max_tokens=self._args.max_response_tokens,
            seed=request_seed(0, sample.id, len(sample.completions)),
            temperature=1.0,
        )


Mode = CollectorMode | Limit


def bench_rollout(args: argparse.Namespace) -> list[dict[str, object]]:
    """Measure every mode, print the table; returns its rows."""
    with tempfile.TemporaryDirectory() as folder:
        engine, sync = start_engine(Path(folder), args)
        law = LengthLaw(
            median_tokens=args.median_tokens, sigma=args.sigma, max_tokens=args.max_response_tokens
        )
        lawful = LawfulEngine(engine, law)
        modes: list[Mode] = [CollectorMode(args, lawful, factor=1.0, refill=False)]
        modes += [
            CollectorMode(args, lawful, factor=f, refill=False) for f in args.factors if f > 1
        ]
        modes += [CollectorMode(args, lawful, factor=f, refill=True) for f in args.factors]
        modes += [Limit(args, lawful, factor=f) for f in args.factors]
        for mode in track(modes, description="warm-up"):
            mode.run(args.warmup_steps, sync)
        slices: dict[int, list[Slice]] = {id(mode): [] for mode in modes}
        turns = [mode for _ in range(args.rounds) for mode in modes]
        for mode in track(turns, description="measuring"):
            slices[id(mode)].append(mode.run(args.steps, sync))
    rows = [row_of(mode, slices[id(mode)]) for mode in modes]
    show(rows, slices[id(modes[0])], law)
    return rows


def start_engine(folder: Path, args: argparse.Namespace) -> tuple[Any, Callable[[], None]]:
    """A real engine on a random 0.6 M-parameter Qwen3, and a call that does what a weight sync does
    to it.
    """
    from tiny_models import write_tiny_qwen3
    from transformers import AutoModelForCausalLM

    from april_rl.engine.vllm_engine import VllmEngine

    write_tiny_qwen3(folder, hidden_size=128, num_layers=4, initializer_range=0.02)
    slots = round(max(args.factors) * args.num_groups * args.group_size)
    engine = VllmEngine(
        model_path=str(folder),
        seed=0,
        dtype="bfloat16",
        max_model_len=args.max_response_tokens + _PROMPT_TOKENS,
        max_num_seqs=slots,
        max_batched_tokens=8192,
        kv_cache_gib=2.0,
        gpu_memory_utilization=0.5,
        enforce_eager=False,
        ignore_eos=True,
    )
    weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    weights.pop("lm_head.weight")
    versions = count(1)
    return engine, lambda: engine.load_weights(iter(weights.items()), policy_version=next(versions))


def row_of(mode: Mode, slices: Sequence[Slice]) -> dict[str, object]:
    """The medians of a mode over rounds, and the spread of its finished samples per second."""
    finished = [s.finished / s.time_s for s in slices]
    return {
        "mode": mode.name,
        "over_sampling_factor": mode.factor,
        "finished_samples_per_s": median(finished),
        "finished_samples_per_s_min": min(finished),
        "finished_samples_per_s_max": max(finished),
        "trained_samples_per_s": median(s.trained / s.time_s for s in slices),
        "generated_tokens_per_s": median(s.generated / s.time_s for s in slices),
        "occupancy": median(s.occupancy for s in slices),
        "reprefill_tokens": median(s.reprefill for s in slices),
        "reprefill_per_generated_token": median(s.reprefill / s.generated for s in slices),
        "controller_frac": median(s.controller_s / s.time_s for s in slices),
    }


def show(rows: Sequence[dict[str, Any]], synchronous: Sequence[Slice], law: LengthLaw) -> None:
    """The table, and the two ratios that count."""
    lengths = [law(SampleId(i, j)) for i in range(500) for j in range(8)]
    p50, p99 = np.percentile(lengths, (50, 99))
    base = median(s.finished / s.time_s for s in synchronous)
    table = Table(
        title=f"response tokens: mean {np.mean(lengths):.0f}, p50 {p50:.0f}, p99 {p99:.0f}, "
        f"max {max(lengths)}"
    )
    heads = (
        "mode",
        "α",
        "samples/s (min-max)",
        "÷ sync",
        "tokens/s",
        "occupancy",
        "re-prefill",
        "controller",
    )
    for head in heads:
        table.add_column(head, justify="left" if head == "mode" else "right")
    for row in rows:
        rate = row["finished_samples_per_s"]
        spread = f"{row['finished_samples_per_s_min']:.0f}-{row['finished_samples_per_s_max']:.0f}"
        table.add_row(
            row["mode"],
            f"{row['over_sampling_factor']:g}",
            f"{rate:.1f} ({spread})",
            f"{rate / base:.2f}",
            f"{row['generated_tokens_per_s']:,.0f}",
            f"{row['occupancy']:.2f}",
            f"{row['reprefill_per_generated_token']:.2f}",
            f"{100 * row['controller_frac']:.1f} %",
        )
    console = Console()
    console.print(table)
    best = max(
        (row for row in rows if row["mode"] == "refill"), key=lambda r: r["finished_samples_per_s"]
    )
    limit = max(row["finished_samples_per_s"] for row in rows if row["mode"] == "limit")
    console.print(
        f"refill at its best α ({best['over_sampling_factor']:g}): "
        f"{best['finished_samples_per_s'] / base:.2f} × synchronous, "
        f"{best['finished_samples_per_s'] / limit:.2f} of the limit"
    )
