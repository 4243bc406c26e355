"""Which modes the rollout benchmark measures, and how long that takes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

_SHORT_WARMUP_STEPS = 3
FACTORS, FULL_FACTORS = (1.5,), (1.0, 1.5, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A mode that will be measured."""

    factor: float
    refill: bool = True
    keeps: bool = False
    is_filtered: bool = False
    is_auto: bool = False
    is_limit: bool = False

    @property
    def is_synchronous(self) -> bool:
        """Return whether no sample starts before its step."""
        return not self.refill and self.factor == 1


def add_rollout_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rollout`."""
    parser.add_argument(
        "--full",
        action="store_true",
        help="every α, and rows with half of the groups rejected: 17 minutes",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps of each mode in a round")
    # A response of full length takes α · 640 ÷ 100 (the mean) steps: 13 with α = 2.
    parser.add_argument(
        "--warmup-steps", type=int, default=14, help="uncounted steps of modes with over-sampling"
    )
    parser.add_argument("--auto-steps", type=int, default=30, help="uncounted steps with α = auto")
    parser.add_argument("--num-groups", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--median-tokens", type=float, default=64.0, help="median response length")
    parser.add_argument("--sigma", type=float, default=1.0, help="standard deviation of log length")
    parser.add_argument("--max-response-tokens", type=int, default=640)
    parser.add_argument("--tick-steps", type=int, default=8)
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    # Above α = (cap + 1) · mean ÷ longest length, 2.6 here, steps alternate: some wait at the cap
    # with empty slots, others find their groups ready. A few steps would not show the mean.
    parser.add_argument("--max-staleness", type=int, default=16)
    parser.add_argument(
        "--factors",
        type=float,
        nargs="+",
        help="values of α; default: 1.5; with --full 1, 1.5 and 2",
    )
    parser.add_argument("--filter-factor", type=float, default=1.5, help="α of the filtered rows")


def planned_modes(args: argparse.Namespace) -> list[Planned]:
    """Return the modes to compare, each refill mode beside the limit with as many samples in
    flight.
    """
    planned = [Planned(factor=1.0, refill=False)]
    factors = factors_of(args)
    if 1.0 not in factors:
        planned.append(Planned(factor=1.0, is_limit=True))
    for factor in factors:
        if factor > 1:
            planned.append(Planned(factor=factor, refill=False))
        planned += [Planned(factor=factor), Planned(factor=factor, keeps=True)]
        planned.append(Planned(factor=factor, is_limit=True))
    planned.append(Planned(factor=1.0, keeps=True, is_auto=True))
    if args.full:
        planned.append(Planned(factor=1.0, refill=False, is_filtered=True))
        factor = args.filter_factor
        planned.append(Planned(factor=factor, is_filtered=True))
        planned.append(Planned(factor=factor, keeps=True, is_filtered=True))
    return planned


def factors_of(args: argparse.Namespace) -> Sequence[float]:
    """Return the over-sampling factors that are measured."""
    factors: Sequence[float] = args.factors or (FULL_FACTORS if args.full else FACTORS)
    return factors


def warmup_steps(args: argparse.Namespace, mode: Planned) -> int:
    """Return the number of steps until a mode is in its steady state.

    With over-sampling, the first steps train short responses only, while the slots fill up with
    long ones: measured too early, a mode looks faster than it is.
    """
    if mode.is_limit or mode.is_synchronous:
        return _SHORT_WARMUP_STEPS
    return int(args.auto_steps if mode.is_auto else args.warmup_steps)
