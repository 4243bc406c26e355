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
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from bench_limit import Limit
from bench_modes import (
    NO_SIGNAL_FRAC,
    PROMPT_TOKENS,
    CollectorMode,
    KeepingEngine,
    LengthLaw,
    Slice,
)
from bench_table import show
from rich.progress import track

from april_rl.rollout.over_sampling import FixedFactor
from april_rl.simulator.engine_cost import EngineCost, fit_cost
from april_rl.simulator.simulation import Scenario, simulate
from april_rl.ticks import Tick
from april_rl.tuning.auto_factor import AutoFactor, Budgets, largest_factor
from april_rl.tuning.prediction import Comparison, Prediction, predict

# The benchmark's model is the tests' random one.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

_SHORT_WARMUP_STEPS = 3
FACTORS = (1.0, 1.5, 2.0)
MAX_BATCHED_TOKENS = 1024  # on CPU, short parts of a prefill stay in the cache


def add_rollout_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `rollout`."""
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps of each mode in a round")
    parser.add_argument(
        "--warmup-steps", type=int, default=20, help="of over-sampling, not counted"
    )
    parser.add_argument("--auto-steps", type=int, default=30, help="warm-up of the learned α")
    parser.add_argument("--num-groups", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--median-tokens", type=float, default=64.0, help="of the length law")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the length law's logarithm")
    parser.add_argument("--max-response-tokens", type=int, default=640)
    parser.add_argument("--tick-steps", type=int, default=8)
    # Above α = (cap + 1) · mean ÷ longest length, 2.6 here, steps take turns: some wait at the cap
    # with empty slots, others find their groups ready. A few steps would not show the mean.
    parser.add_argument("--max-staleness", type=int, default=16)
    parser.add_argument("--factors", type=float, nargs="+", default=FACTORS)
    parser.add_argument("--filter-factor", type=float, default=1.5, help="α of the filtered rows")


Mode = CollectorMode | Limit


def bench_rollout(args: argparse.Namespace) -> list[dict[str, object]]:
    """Measure every mode, print the table; returns its rows."""
    with tempfile.TemporaryDirectory() as folder:
        engine, sync = start_engine(Path(folder), args)
        modes = modes_of(args, engine)
        for mode in track(modes, description="warm-up"):
            mode.run(warmup_steps(args, mode), sync)
        slices: dict[int, list[Slice]] = {id(mode): [] for mode in modes}
        # In a round the order is drawn: no mode is always measured behind the same other one.
        order = random.Random(0)
        turns = [mode for _ in range(args.rounds) for mode in order.sample(modes, len(modes))]
        for mode in track(turns, description="measuring"):
            slices[id(mode)].append(mode.run(args.steps, sync))
    rows = rows_of(modes, slices)
    add_simulated(rows, args, modes, slices)
    notes = [f"auto: {n}" for m in modes if isinstance(m, CollectorMode) for n in m.notes]
    show(rows, LengthLaw.of(args), notes)
    return rows


def modes_of(args: argparse.Namespace, engine: KeepingEngine) -> list[Mode]:
    """What is compared stands side by side: refill and the limit with as many in flight."""

    def collector(factor: float, **how: bool) -> CollectorMode:
        return CollectorMode(args, engine, over_sampling=FixedFactor(factor), **how)

    modes: list[Mode] = [collector(1.0, refill=False)]
    for factor in args.factors:
        if factor > 1:
            modes.append(collector(factor, refill=False))
        modes.append(collector(factor, refill=True))
        modes.append(collector(factor, refill=True, keeps=True))
        modes.append(Limit(args, engine, factor=factor))
    auto = automatic(args, kv_cache_tokens=engine.kv_cache_tokens)
    modes.append(
        CollectorMode(args, engine, over_sampling=auto, refill=True, keeps=True, is_auto=True)
    )
    modes.append(collector(1.0, refill=False, is_filtered=True))
    factor = args.filter_factor
    modes.append(collector(factor, refill=True, is_filtered=True))
    modes.append(collector(factor, refill=True, keeps=True, is_filtered=True))
    return modes


def warmup_steps(args: argparse.Namespace, mode: Mode) -> int:
    """Steps until a mode is in its steady state.

    With over-sampling, the first steps train short responses only, and the slots fill up with long
    ones: measured too early, a mode profits from its beginning.
    """
    if isinstance(mode, Limit) or mode.is_synchronous:
        return _SHORT_WARMUP_STEPS
    return int(args.auto_steps if mode.is_auto else args.warmup_steps)


def automatic(args: argparse.Namespace, *, kv_cache_tokens: int) -> AutoFactor:
    """rollout.over_sampling_factor=auto, which simulates between two steps: this is not timed."""
    settings = Scenario(
        cost=EngineCost(step_s=1.0, sample_s=0.0, context_token_s=0.0, prefill_token_s=0.0),
        law=LengthLaw.of(args),
        num_groups=args.num_groups,
        group_size=args.group_size,
        max_response_tokens=args.max_response_tokens,
        tick_steps=args.tick_steps,
        max_batched_tokens=MAX_BATCHED_TOKENS,
        max_staleness=args.max_staleness,
        keeps_parked=True,
    )

    def at_once(comparison: Comparison) -> Future[list[Prediction]]:
        (predictions := Future()).set_result(predict(comparison))
        return predictions

    budgets = Budgets(max_off_policy_frac=1.0, kv_cache_tokens=kv_cache_tokens)
    return AutoFactor(settings, budgets, refill=True, submit=at_once)


def rows_of(modes: Sequence[Mode], slices: Mapping[int, list[Slice]]) -> list[dict[str, Any]]:
    """A row a mode, against the synchronous one with its filter and the limit with its α."""
    limits = {mode.factor: slices[id(mode)] for mode in modes if isinstance(mode, Limit)}
    plain = {
        mode.is_filtered: slices[id(mode)]
        for mode in modes
        if isinstance(mode, CollectorMode) and mode.is_synchronous
    }
    return [
        row_of(
            mode,
            slices[id(mode)],
            synchronous=plain[isinstance(mode, CollectorMode) and mode.is_filtered],
            limit=limits[min(limits, key=lambda factor: abs(factor - mode.factor))],
        )
        for mode in modes
    ]


def add_simulated(
    rows: Sequence[dict[str, Any]],
    args: argparse.Namespace,
    modes: Sequence[Mode],
    slices: Mapping[int, list[Slice]],
) -> None:
    """What the simulator says of each mode, with the cost of the engine steps that were measured.

    The rows of the limit get none: nothing collects there.
    """
    cost = measured_cost([tick for parts in slices.values() for p in parts for tick in p.ticks])
    collected = [
        part for mode in modes if isinstance(mode, CollectorMode) for part in slices[id(mode)]
    ]
    controller_s = sum(p.controller_s for p in collected) / sum(len(p.ticks) for p in collected)
    for row, mode in zip(rows, modes, strict=True):
        if isinstance(mode, Limit):
            continue
        scenario = Scenario(
            cost=cost,
            law=LengthLaw.of(args),
            num_groups=args.num_groups,
            group_size=args.group_size,
            max_response_tokens=args.max_response_tokens,
            prompt_tokens=PROMPT_TOKENS,
            tick_steps=args.tick_steps,
            max_batched_tokens=MAX_BATCHED_TOKENS,
            max_staleness=args.max_staleness,
            keeps_parked=mode.keeps,
            no_signal_frac=NO_SIGNAL_FRAC,
            is_filtered=mode.is_filtered,
            in_process=True,
            controller_s=controller_s,
        )
        outcome = simulate(
            scenario,
            over_sampling=FixedFactor(mode.factor),
            refill=mode.refill,
            num_steps=args.rounds * args.steps,
            warmup_steps=warmup_steps(args, mode),
        )
        measured = median(part.finished / part.time_s for part in slices[id(mode)])
        row["simulated_samples_per_s"] = outcome.finished_samples_per_s
        row["simulation_error"] = outcome.finished_samples_per_s / measured - 1


def measured_cost(ticks: Sequence[Tick]) -> EngineCost:
    """What explains the ticks, and all of their time: the fit leaves out what the machine held up,
    the modes' seconds have it.
    """
    cost = fit_cost(ticks)
    expected_s = sum(
        cost.seconds(
            engine_steps=tick.engine_steps,
            slot_steps=tick.slot_steps,
            context_token_steps=tick.context_token_steps,
            prefilled_tokens=tick.prefilled_tokens,
        )
        for tick in ticks
    )
    held_up = sum(tick.elapsed_s for tick in ticks) / expected_s
    print(f"{len(ticks)} ticks, {100 * (held_up - 1):+.0f} % against what fits most: {cost}")
    return EngineCost(**{name: held_up * seconds for name, seconds in asdict(cost).items()})


def start_engine(folder: Path, args: argparse.Namespace) -> tuple[Any, Callable[[], None]]:
    """A real engine on a random 0.6 M-parameter Qwen3, and a call that does what a weight sync does
    to it.
    """
    from tiny_models import write_tiny_qwen3
    from transformers import AutoModelForCausalLM

    from april_rl.config.engine import EngineConfig
    from april_rl.engine.vllm_engine import VllmEngine

    write_tiny_qwen3(folder, hidden_size=128, num_layers=4, initializer_range=0.02)
    most = max(*args.factors, largest_factor(args.max_staleness))
    slots = round(most * args.num_groups * args.group_size)
    engine = VllmEngine(
        EngineConfig(
            max_batched_tokens=MAX_BATCHED_TOKENS, kv_cache_gib=2.0, gpu_memory_utilization=0.5
        ),
        model_path=str(folder),
        seed=0,
        temperature=1.0,
        max_model_len=args.max_response_tokens + PROMPT_TOKENS,
        max_num_seqs=slots,
        keeps_parked=True,
        sleeps=True,
        stop_tokens=(),
    )
    weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    weights.pop("lm_head.weight")
    versions = count(1)
    return engine, lambda: engine.load_weights(iter(weights.items()), policy_version=next(versions))


def row_of(
    mode: Mode, slices: Sequence[Slice], *, synchronous: Sequence[Slice], limit: Sequence[Slice]
) -> dict[str, object]:
    """The medians of a mode over rounds, and the spread of its finished samples per second.

    Its ratios are medians of the ratios within each round: to the synchronous mode in trained
    samples, and to the limit with as many samples in flight in finished ones.
    """
    finished = [s.finished / s.time_s for s in slices]
    return {
        "mode": mode.name,
        "resume": "keep" if isinstance(mode, CollectorMode) and mode.keeps else "reprefill",
        "is_filtered": isinstance(mode, CollectorMode) and mode.is_filtered,
        "is_auto": isinstance(mode, CollectorMode) and mode.is_auto,
        "over_sampling_factor": mode.factor,
        "finished_samples_per_s": median(finished),
        "finished_samples_per_s_min": min(finished),
        "finished_samples_per_s_max": max(finished),
        "of_synchronous": _ratio("trained", slices, synchronous),
        "of_limit": _ratio("finished", slices, limit),
        "trained_samples_per_s": median(s.trained / s.time_s for s in slices),
        "generated_tokens_per_s": median(s.generated / s.time_s for s in slices),
        "occupancy": median(s.occupancy for s in slices),
        "reprefill_tokens": median(s.reprefill for s in slices),
        "reprefill_per_generated_token": median(s.reprefill / s.generated for s in slices),
        "controller_frac": median(s.controller_s / s.time_s for s in slices),
    }


def _ratio(count: str, slices: Sequence[Slice], others: Sequence[Slice]) -> float:
    pairs = zip(slices, others, strict=True)
    return median((getattr(a, count) / a.time_s) / (getattr(b, count) / b.time_s) for a, b in pairs)
