"""`python -m april_rl simulate --run DIR` or `--preset NAME`: simulate over-sampling factors with
the production collector and simulated engines.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import track

from april_rl.errors import RunError
from april_rl.lab.commands.output import write_figures
from april_rl.lab.simulator.calibration import Calibration
from april_rl.lab.simulator.length_distributions import Lognormal, Recorded, median_for
from april_rl.lab.simulator.prediction import modes_of, predict
from april_rl.lab.simulator.presets import PRESETS
from april_rl.lab.simulator.simulation import Scenario
from april_rl.lab.simulator.tables import comparison_table
from april_rl.lab.simulator.turns import Turns
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


class SimulationError(RunError):
    """The simulation cannot be set up as requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A scenario and its origin."""

    scenario: Scenario
    refill: bool
    title: str
    kv_bytes_per_token: int | None  # None: unknown for a recorded run
    doubt: str = ""  # a caveat about the scenario, for the user


def main(arguments: Sequence[str]) -> int:
    """Simulate what the command line asks for, print the table and return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        found = _compare(_source(options), options)
        if options.json is not None:
            write_figures(options.json, found)
    except ValueError as error:
        raise SimulationError(str(error)) from error
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Arguments(
        prog="python -m april_rl simulate",
        description="Step time, gain over synchronous, ages and memory at several over-sampling "
        "factors, without a GPU. See docs/usage.md.",
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--run", type=Path, metavar="DIR", help="a run directory: its lengths, settings and costs"
    )
    where.add_argument("--preset", choices=sorted(PRESETS), help="a model on a GPU")
    parser.add_argument(
        "--alpha", type=partial(at_least, 1, float), nargs="+", default=[1.5, 2.0, 3.0]
    )
    parser.add_argument(
        "--mean-tokens", type=float, help="with --preset: mean length (default 6000)"
    )
    parser.add_argument(
        "--sigma", type=float, help="with --preset: deviation of log length (default 0.8)"
    )
    parser.add_argument(
        "--correlation", type=float, help="with --preset: of lengths in a group (default 0.3)"
    )
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="with --preset: calibration.json of a GPU"
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


def _source(options: argparse.Namespace) -> Source:
    """Return the scenario of the run or the preset, with the command line's changes."""
    if options.calibration and not options.preset:
        raise SimulationError("--calibration has an effect with --preset only; remove it")
    source = _load_run(options.run) if options.run else _preset(options)
    given = {name: getattr(options, name) for name, _, _ in _FIELDS}
    if options.resume:
        given["keeps_parked"] = options.resume == "keep"
    if options.on_stale:
        given["finish_stale"] = options.on_stale == "finish"
    given["is_filtered"] = options.filter
    chosen = {name: value for name, value in given.items() if value is not None}
    scenario = replace(source.scenario, **chosen)
    if options.run and (options.mean_tokens or options.sigma or options.correlation):
        raise SimulationError(
            "--mean-tokens, --sigma and --correlation have no effect with --run, which uses the "
            "run's recorded lengths; remove them"
        )
    scenario = replace(scenario, length_of=_length_of(options, scenario), turns=_turns(options))
    refill = source.refill if options.refill is None else options.refill
    return replace(source, scenario=scenario, refill=refill)


def _turns(options: argparse.Namespace) -> Turns | None:
    """Return the turns that the command line asks for; None without `--turns`."""
    given = {name: getattr(options, name) for name, _, _ in _TURN_FIELDS}
    chosen = {name: value for name, value in given.items() if value is not None}
    if options.turns is not None:
        return Turns(num_turns=options.turns, **chosen)
    if chosen:
        raise SimulationError(
            "--observation-tokens, --tool-s and --tool-sigma have no effect without --turns; "
            "remove them"
        )
    return None


def _length_of(options: argparse.Namespace, scenario: Scenario) -> Lognormal | Recorded:
    """Return the length distribution with the scenario's seed and budget."""
    if isinstance(scenario.length_of, Recorded):
        return replace(scenario.length_of, seed=scenario.seed)
    sigma = 0.8 if options.sigma is None else options.sigma
    correlation = 0.3 if options.correlation is None else options.correlation
    if sigma < 0 or not 0 <= correlation <= 1:
        raise SimulationError("--sigma must be >= 0 and --correlation in [0, 1]")
    mean_tokens = 6000.0 if options.mean_tokens is None else options.mean_tokens
    median = median_for(mean_tokens, sigma=sigma, cap=scenario.max_response_tokens)
    return Lognormal(median_tokens=median, sigma=sigma, correlation=correlation, seed=scenario.seed)


def _preset(options: argparse.Namespace) -> Source:
    preset, title = PRESETS[options.preset], options.preset
    measured = Calibration.read(options.calibration) if options.calibration else None
    if measured:
        title += f" on {measured.device}"
    # A stand-in: `_length_of` knows the final budget.
    placeholder = Lognormal(median_tokens=1.0, sigma=0.0)
    return Source(
        scenario=Scenario(
            cost=preset.cost(measured), length_of=placeholder, num_engines=8, tick_steps=32
        ),
        refill=True,
        title=title,
        kv_bytes_per_token=preset.kv_bytes_per_token,
    )


def _load_run(run_dir: Path) -> Source:
    """Return the scenario of a recorded run, which has its lengths, rewards, cost and
    configuration.
    """
    from april_rl.config.store import run_config
    from april_rl.lab.simulator.recorded_run import NO_SMALL_BATCHES, recorded_scenario

    config = run_config(run_dir / "config.yaml")
    is_even = config.rollout.refill and config.rollout.over_sampling_factor != 1
    return Source(
        scenario=recorded_scenario(run_dir, config),
        refill=config.rollout.refill,
        title=str(run_dir),
        kv_bytes_per_token=None,
        doubt=NO_SMALL_BATCHES if is_even else "",
    )


def _compare(source: Source, options: argparse.Namespace) -> list[dict[str, object]]:
    """Simulate the synchronous loop and every α; print the table and return its rows."""
    scenario = source.scenario
    _check_cap(scenario, max(options.alpha))
    modes = modes_of(options.alpha, refill=source.refill)
    predictions = predict(
        scenario, modes, num_steps=options.steps, warmup_steps=max(0, options.warmup_steps)
    )
    console = Console(stderr=True)
    found = list(track(predictions, "simulating", total=len(modes), console=console))
    title = (
        f"{source.title}: {scenario.num_groups} x {scenario.group_size} samples a step on "
        f"{scenario.num_engines} engine(s), filter {'on' if scenario.is_filtered else 'off'}, "
        f"staleness cap {scenario.max_staleness}, "
        f"{'KV kept' if scenario.keeps_parked else 're-prefill'}"
    )
    table = comparison_table(found, title=title, kv_bytes_per_token=source.kv_bytes_per_token)
    shown = Console(width=120)
    shown.print(table)
    if source.doubt:
        shown.print(source.doubt)
    return [each.figures() for each in found]


def _check_cap(scenario: Scenario, factor: float) -> None:
    """Raise an error for a staleness cap below α - 1, as the configuration does."""
    if scenario.max_staleness < factor - 1:
        raise SimulationError(
            f"--max-staleness must be >= {factor - 1:g} with --alpha {factor:g} (a sample stays "
            f"about that many steps), got {scenario.max_staleness}"
        )
