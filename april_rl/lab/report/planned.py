"""A run beside its plan (`python -m april_rl plan`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from april_rl.lab.report.run_files import ReportError, RunFiles

_OFF = 0.1  # an assumption is named if it is off by more than this share


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """A part of a step, in seconds."""

    name: str
    planned: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.measured / self.planned


@dataclass(frozen=True, slots=True)
class Planned:
    """The parts of a mean step, and the tokens of a response."""

    parts: tuple[PlannedPart, ...]
    tokens: PlannedPart

    @classmethod
    def of(cls, run: RunFiles, path: Path) -> Self:
        """Return what the file of `plan json=FILE` says of this run. Raise ReportError if it says
        nothing of its number of GPUs or its schedule, or the run has no step.
        """
        planned = _schedule(run, path)
        names = ("step", "rollout", "update")
        step_s, rollout_s, update_s = (run.mean(f"time/{name}_s") for name in names)
        tokens = run.mean("rollout/response_tokens_mean")
        if step_s is None or rollout_s is None or update_s is None or tokens is None:
            raise ReportError(f"{run.run_dir} has no step to hold to {path}")
        measured = {"rollout": rollout_s, "update": update_s}
        measured |= {"rest": step_s - rollout_s - update_s, "step": step_s}
        parts = [PlannedPart(k, planned[f"{k}_s"], seconds) for k, seconds in measured.items()]
        assumed = planned["mean_response_tokens"]
        return cls(tuple(parts), PlannedPart("tokens of a response", assumed, tokens))

    def lines(self) -> Iterator[str]:
        """Yield a line for each part, and one for each assumption that was off."""
        for part in self.parts:
            yield (
                f"plan: {part.name} {part.planned:,.1f} s a step, measured {part.measured:,.1f} s "
                f"({part.ratio:.2f} times)"
            )
        longer = self.tokens.ratio
        if abs(longer - 1) > _OFF:
            yield (
                f"plan: responses have {self.tokens.measured:,.0f} tokens where "
                f"{self.tokens.planned:,.0f} were assumed ({longer:.2f} times): "
                "plan again with mean_response_tokens or lengths=RUN"
            )
        causes = {"rollout": "engine's speed or the spread of lengths", "update": "learner's speed"}
        for part in self.parts:
            if part.name in causes and abs(part.ratio / longer - 1) > _OFF:
                yield (
                    f"plan: for their length, the {part.name} took {part.ratio / longer:.2f} times "
                    f"as long as planned: the {causes[part.name]} (calibration=FILE has measured "
                    "speeds)"
                )


def planned_beside(variants: Mapping[str, Sequence[RunFiles]], path: Path) -> Iterator[str]:
    """Yield the planned and the measured step of each variant, and the gain over the first; raise
    ReportError as `Planned.of` does.
    """
    first: PlannedPart | None = None
    for name, runs in variants.items():
        parts = [Planned.of(run, path).parts[-1] for run in runs]
        step = PlannedPart(name, parts[0].planned, fmean(part.measured for part in parts))
        text = f"plan: {name}: {step.planned:,.1f} s a step, measured {step.measured:,.1f} s"
        if first:
            gain = f"{first.planned / step.planned:.2f} planned, "
            gain += f"{first.measured / step.measured:.2f} measured"
            text += f"; gain over {first.name}: {gain}"
        first = first or step
        yield text


def _schedule(run: RunFiles, path: Path) -> Mapping[str, Any]:
    """Return the plan's figures of the run's schedule on its number of GPUs."""
    count = run.number("runtime.num_workers")  # 0 for auto
    factor = run.number("rollout.over_sampling_factor")
    is_refill = bool(run.setting("rollout.refill"))
    try:
        plans = json.loads(path.read_text(encoding="utf-8"))
        found = [
            {**plan, **schedule}
            for plan in plans
            if count in (0, plan["num_gpus"])
            for schedule in plan.get("schedules", ())
            if schedule["over_sampling_factor"] == factor and schedule["refill"] == is_refill
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReportError(f"--plan {path} is not what plan json=FILE writes ({error})") from error
    if len(found) != 1:
        kinds = ", ".join(f"{plan['num_gpus']} x {plan['gpu']}" for plan in found) or "none"
        raise ReportError(
            f"--plan {path} must have one choice of GPUs for this run (its number of workers, "
            f"α = {factor:g}, refill={str(is_refill).lower()}), and has {kinds}: plan again with "
            "gpus=KIND:NUMBER"
        )
    return found[0]
