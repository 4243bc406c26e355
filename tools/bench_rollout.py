"""How fast samples are finished: synchronous, one-shot and refill at several over-sampling factors,
and the limit.

The real collector drives the real engine in this process. Response lengths follow a lognormal
distribution: a sample's length is drawn from its id, so every mode is given the same work. Modes
take turns in rounds, because the machine's speed drifts, and the table shows medians over rounds
with the smallest and the largest value. The *limit* is an engine that is never short of work and
never aborted, with the same number of samples in flight.

Without `--full` there is one over-sampling factor and no filter: what the README shows, in minutes.
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
    CappedLognormal,
    CollectorMode,
    KeepingEngine,
    Slice,
)
from bench_rollout_plan import Planned, factors_of, planned_modes, warmup_steps
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

MAX_BATCHED_TOKENS = 1024  # on CPU, short parts of a prefill stay in the cache
Mode = CollectorMode | Limit


def bench_rollout(args: argparse.Namespace) -> list[dict[str, object]]:
    """Measure every mode, print the table; returns its rows."""
    planned = planned_modes(args)
    with tempfile.TemporaryDirectory() as folder:
        engine, sync = start_engine(Path(folder), args)
        modes = [mode_of(each, args, engine) for each in planned]
        for each, mode in track([*zip(planned, modes, strict=True)], description="warm-up"):
            mode.run(warmup_steps(args, each), sync)
        slices: dict[int, list[Slice]] = {id(mode): [] for mode in modes}
        # The order is shuffled in each round: no mode always follows the same other one.
        order = random.Random(0)
        turns = [mode for _ in range(args.rounds) for mode in order.sample(modes, len(modes))]
        for mode in track(turns, description="measuring"):
            slices[id(mode)].append(mode.run(args.steps, sync))
    rows = rows_of(modes, slices)
    warmups = [warmup_steps(args, each) for each in planned]
    add_simulated(rows, args, dict(zip(modes, warmups, strict=True)), slices)
    notes = [f"auto: {n}" for m in modes if isinstance(m, CollectorMode) for n in m.notes]
    show(rows, CappedLognormal.of(args), notes)
    return rows


def mode_of(planned: Planned, args: argparse.Namespace, engine: KeepingEngine) -> Mode:
    """Build a planned mode on the engine that all of them share."""
    if planned.is_limit:
        return Limit(args, engine, factor=planned.factor)
    return CollectorMode(
        args,
        engine,
        over_sampling=automatic(args, kv_cache_tokens=engine.kv_cache_tokens)
        if planned.is_auto
        else FixedFactor(planned.factor),
        refill=planned.refill,
        keeps=planned.keeps,
        is_filtered=planned.is_filtered,
        is_auto=planned.is_auto,
    )


def automatic(args: argparse.Namespace, *, kv_cache_tokens: int) -> AutoFactor:
    """rollout.over_sampling_factor=auto, which simulates between two steps: this is not timed."""
    settings = Scenario(
        cost=EngineCost(step_s=1.0, sample_s=0.0, context_token_s=0.0, prefill_token_s=0.0),
        length_of=CappedLognormal.of(args),
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
    """Return a row for each mode, with ratios to the synchronous mode with its filter and the limit
    with its α.
    """
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
    warmups: Mapping[Mode, int],
    slices: Mapping[int, list[Slice]],
) -> None:
    """Add the simulator's prediction for each mode, with the engine's cost as measured.

    Rows of the limit get none, since they have no collector.
    """
    cost = measured_cost([tick for parts in slices.values() for p in parts for tick in p.ticks])
    collected = [
        part for mode in warmups if isinstance(mode, CollectorMode) for part in slices[id(mode)]
    ]
    controller_s = sum(p.controller_s for p in collected) / sum(len(p.ticks) for p in collected)
    for row, (mode, warmup) in zip(rows, warmups.items(), strict=True):
        if isinstance(mode, Limit):
            continue
        scenario = Scenario(
            cost=cost,
            length_of=CappedLognormal.of(args),
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
            warmup_steps=warmup,
        )
        measured = median(part.finished / part.time_s for part in slices[id(mode)])
        row["simulated_samples_per_s"] = outcome.finished_samples_per_s
        row["simulation_error"] = outcome.finished_samples_per_s / measured - 1


def measured_cost(ticks: Sequence[Tick]) -> EngineCost:
    """Fit a cost to the ticks and scale it to their total time: the fit ignores ticks that were
    delayed, but the modes' seconds include them.
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
    """Return a real engine on a random 0.6 M-parameter Qwen3, and a function that does to it what a
    weight sync does.
    """
    from tiny_models import write_tiny_qwen3
    from transformers import AutoModelForCausalLM

    from april_rl.config.choices import ComputeDtype
    from april_rl.config.engine import EngineConfig
    from april_rl.engine.vllm_engine import VllmEngine
    from april_rl.runtime.layout import precision
    from april_rl.runtime.preflight import pick_device

    write_tiny_qwen3(folder, hidden_size=128, num_layers=4, initializer_range=0.02)
    most = max(*factors_of(args), largest_factor(args.max_staleness))
    slots = round(most * args.num_groups * args.group_size)
    engine = VllmEngine(
        EngineConfig(
            dtype=precision(ComputeDtype[args.dtype], pick_device("auto")),
            max_batched_tokens=MAX_BATCHED_TOKENS,
            kv_cache_gib=2.0,
            gpu_memory_utilization=0.5,
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
    """Return the medians of a mode over rounds, and the spread of its finished samples per second.

    Its ratios are medians of the ratios within each round: trained samples against the synchronous
    mode, and finished samples against the limit with as many samples in flight.
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
