"""`python -m april_rl simulate --run DIR`: what a recorded run would do at other over-sampling
factors, by the production collector on simulated engines.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import track

from april_rl.errors import RunError
from april_rl.lab.commands.output import write_figures
from april_rl.lab.simulator.length_distributions import Recorded
from april_rl.lab.simulator.prediction import comparison_table, modes_of, predict
from april_rl.lab.simulator.simulation import Scenario
from april_rl.lab.simulator.turns import NUMBERS, Turns
from april_rl.start.commands.arguments import Arguments, at_least

# Options that replace a field of the scenario: its name, type and meaning.
_FIELDS: tuple[tuple[str, type, str], ...] = (
    ("num_groups", int, "N, groups trained in a step"),
    ("group_size", int, "G, samples of one prompt"),
    ("max_response_tokens", int, "longest response in tokens"),
    ("prompt_tokens", int, "tokens of every prompt"),
    ("num_engines", int, "number of engines"),
    ("tick_steps", int, "engine steps between two decisions; a higher number simulates faster"),
    ("max_batched_tokens", int, "tokens of one engine step"),
    ("max_staleness", int, "cap on the age of a trained token"),
    ("no_signal_frac", float, "share of groups with equal rewards"),
    ("score_s", float, "seconds from a sample's end to its reward"),
    ("rest_s", float, "seconds of a step outside the rollout"),
    ("seed", int, "seed of lengths, rewards and tools"),
)
# Options of samples with several turns, in addition to --turns.
_TURN_FIELDS: tuple[tuple[str, type, str], ...] = (
    ("observation_tokens", int, "with --turns: tokens that a tool call adds (default 0)"),
    ("tool_s", float, "with --turns: median seconds of a tool call (default 0)"),
    ("tool_sigma", float, "with --turns: deviation of the log seconds of a call (default 0)"),
)


def main(arguments: Sequence[str]) -> int:
    """Simulate what the command line asks for, print the table and return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        found = _compare(options)
        if options.json is not None:
            write_figures(options.json, found)
    except ValueError as error:
        raise RunError(str(error)) from error
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Arguments(
        prog="python -m april_rl simulate",
        description="Step time, gain over synchronous, ages and memory at several over-sampling "
        "factors, without a GPU. See docs/usage.md.",
    )
    parser.add_argument(
        "--run",
        type=Path,
        required=True,
        metavar="DIR",
        help="a run directory: its lengths, settings and costs",
    )
    parser.add_argument(
        "--alpha", type=partial(at_least, 1, float), nargs="+", default=[1.5, 2.0, 3.0]
    )
    yes_no = argparse.BooleanOptionalAction
    parser.add_argument("--refill", action=yes_no, help="fill a finished sample's slot at once")
    parser.add_argument("--filter", action=yes_no, help="reject groups without signal")
    parser.add_argument("--resume", choices=("reprefill", "keep"))
    parser.add_argument("--on-stale", choices=("finish", "mask"))
    parser.add_argument(
        "--turns",
        type=partial(at_least, 1, int),
        help="turns of every sample, of equal length, with a tool call between each two "
        "(default: no environment)",
    )
    for name, kind, meaning in (*_FIELDS, *_TURN_FIELDS):
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=meaning)
    parser.add_argument(
        "--steps", type=partial(at_least, 1, int), default=12, help="steps to count (default 12)"
    )
    parser.add_argument(
        "--warmup-steps", type=int, default=6, help="steps before these (default 6)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures here")
    return parser


def _compare(options: argparse.Namespace) -> list[dict[str, object]]:
    """Simulate the synchronous loop and every α; print the table and return its rows."""
    from april_rl.config.store import run_config
    from april_rl.lab.report.recorded_run import NO_SMALL_BATCHES, recorded_scenario
    from april_rl.lab.report.run_files import read_run

    config = run_config(options.run / "config.yaml")
    rollout = config.rollout
    scenario = _with_options(recorded_scenario(read_run(options.run), config), options)
    if scenario.max_staleness < (factor := max(options.alpha)) - 1:  # as the configuration refuses
        raise RunError(
            f"--max-staleness must be >= {factor - 1:g} with --alpha {factor:g} (a sample stays "
            f"about that many steps), got {scenario.max_staleness}"
        )
    refill = rollout.refill if options.refill is None else options.refill
    modes = modes_of(options.alpha, refill=refill)
    predictions = predict(
        scenario, modes, num_steps=options.steps, warmup_steps=max(0, options.warmup_steps)
    )
    console = Console(stderr=True)
    found = list(track(predictions, "simulating", total=len(modes), console=console))
    title = (
        f"{options.run}: {scenario.num_groups} x {scenario.group_size} samples a step on "
        f"{scenario.num_engines} engine(s), filter {'on' if scenario.is_filtered else 'off'}, "
        f"staleness cap {scenario.max_staleness}, "
        f"{'KV kept' if scenario.keeps_parked else 're-prefill'}"
    )
    shown = Console(width=120)
    shown.print(comparison_table(found, title=title))
    if rollout.refill and rollout.over_sampling_factor != 1:
        shown.print(NO_SMALL_BATCHES)
    return [each.figures() for each in found]


def _with_options(scenario: Scenario, options: argparse.Namespace) -> Scenario:
    """Return the scenario with the command line's changes."""
    given = {name: getattr(options, name) for name, _, _ in _FIELDS}
    if options.resume:
        given["keeps_parked"] = options.resume == "keep"
    if options.on_stale:
        given["finish_stale"] = options.on_stale == "finish"
    given["is_filtered"] = options.filter
    chosen = {name: value for name, value in given.items() if value is not None}
    turns = {name: value for name in NUMBERS if (value := getattr(options, name)) is not None}
    changed = replace(scenario, **chosen, turns=Turns.of(turns))
    assert isinstance(scenario.length_of, Recorded)
    return replace(changed, length_of=replace(scenario.length_of, seed=changed.seed))
