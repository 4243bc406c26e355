"""Compare runs: variants of one experiment, each with its seeds, against the first of them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from april_rl.lab.report.compared_run import FIGURES, Budget, Figure, begins_within, best_accuracy
from april_rl.lab.report.run_files import ReportError, RunFiles, read_run

SYNCHRONOUS = "synchronous"
_MAX_HEAD = 40  # characters
_MIN_SEEDS, _MIN_STEPS = 2, 10  # with fewer, a ratio of two variants is noise
# Two-sided 95 % quantiles of Student's t, for 1 … 10 degrees of freedom.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_SCHEDULE = ("rollout.over_sampling_factor", "rollout.refill")
# Two accuracies can be compared only if these settings, and the evaluation set, are the same.
_SCORING = (
    *("reward.function", "reward.functions", "reward.args", "reward.extract", "data"),
    *("evaluation.temperature", "evaluation.top_p"),
    *("evaluation.max_response_tokens", "evaluation.max_prompts"),
)
# Settings in which runs of one variant may differ.
_PLACES = ("seed", "resume", "name", "tracking", "checkpoint")


class Cell(NamedTuple):
    """A figure of a variant, as text."""

    mean: str  # mean over its runs
    versus: str  # compared with the baseline


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """The variants by name, the baseline first, and the budget at which they are compared."""

    variants: Mapping[str, Sequence[RunFiles]]
    budget: Budget
    differences: Mapping[str, str]  # settings that the names of the variants do not show

    @property
    def baseline(self) -> str:
        """Return the name of the variant that the others are compared with."""
        return next(iter(self.variants))

    def mean(self, figure: Figure, variant: str) -> float | None:
        """Return the mean of a figure over the seeds of a variant that have it."""
        values = self._values(figure, variant)
        return fmean(values.values()) if values else None

    def missing(self, figure: Figure, variant: str) -> int:
        """Return how many runs of a variant do not have the figure."""
        return sum(figure.value(run, self.budget) is None for run in self.variants[variant])

    def pair(self, figure: Figure, variant: str) -> tuple[float, float] | None:
        """Compare a variant with the baseline on their common seeds. Return the mean difference (of
        shares) or the mean logarithm of the ratio (of other figures), with half its 95 % interval.
        Return None without a pair; the interval of a single pair is infinite.
        """
        mine, base = self._values(figure, variant), self._values(figure, self.baseline)
        pairs = [(mine[seed], base[seed]) for seed in mine if seed in base]
        if not figure.is_share:
            pairs = [(a, b) for a, b in pairs if a > 0 and b > 0]
        if not pairs:
            return None
        found = [a - b if figure.is_share else math.log(a / b) for a, b in pairs]
        if len(found) == 1:
            return found[0], math.inf
        quantile = _STUDENT[min(len(found) - 1, len(_STUDENT)) - 1]
        return fmean(found), quantile * stdev(found) / math.sqrt(len(found))

    def doubts(self) -> dict[str, list[str]]:
        """Return the reasons for omitted ratios, each with the variants concerned."""
        found: dict[str, list[str]] = {}
        for variant in [*self.variants][1:]:
            figures = [figure for figure in FIGURES if self.pair(figure, variant)]
            reasons = [doubt for figure in figures for doubt in self._doubts(figure, variant)]
            for reason in dict.fromkeys(reasons):
                found.setdefault(reason, []).append(variant)
        return found

    def unlike_scores(self) -> list[str]:
        """Return the settings, with their values, by which accuracies of these runs may not mean
        the same; none if there are no accuracies.
        """
        name = self.budget.evaluation_set
        if not name:
            return []
        flat = [flat_settings(run.config) for runs in self.variants.values() for run in runs]
        deciding = (*_SCORING, f"evaluation.sets.{name}")
        return [
            f"{key}={' or '.join(dict.fromkeys(str(each.get(key)) for each in flat))}"
            for key in differing_keys(flat)
            if any(f"{key}.".startswith(f"{section}.") for section in deciding)
        ]

    def _doubts(self, figure: Figure, variant: str) -> Iterator[str]:
        """Yield the reasons why chance alone could explain the ratio of a variant to the
        baseline.
        """
        if figure.is_share:
            return
        seeds = self._values(figure, variant).keys() & self._values(figure, self.baseline)
        if len(seeds) < _MIN_SEEDS:
            yield f"fewer than {_MIN_SEEDS} seeds in common"
        runs = [*self.variants[variant], *self.variants[self.baseline]]
        if min(len(run.steps) for run in runs) < _MIN_STEPS:
            yield f"a run of fewer than {_MIN_STEPS} steps"
        if figure.is_to_accuracy and any(begins_within(run, self.budget) for run in runs):
            yield "an accuracy to reach that is inside the 95 % interval of a first evaluation"

    def _values(self, figure: Figure, variant: str) -> dict[str, float]:
        """Return the figure by seed, averaged over the runs of a seed."""
        found: dict[str, list[float]] = {}
        for run in self.variants[variant]:
            value = figure.value(run, self.budget)
            if value is not None:
                found.setdefault(str(run.setting("seed")), []).append(value)
        return {seed: fmean(values) for seed, values in found.items()}

    def versus(self, figure: Figure, variant: str) -> str:
        """Return the paired comparison as text: × 1.31 [1.20, 1.43], or a difference; empty if
        chance alone could explain a ratio.
        """
        if variant == self.baseline or (found := self.pair(figure, variant)) is None:
            return ""
        if any(self._doubts(figure, variant)):
            return ""
        middle, half = found
        if figure.is_share:
            scale, digits, unit = (100, 1, " points") if "%" in figure.write(0) else (1, 3, "")
            interval = "" if math.isinf(half) else f" ± {scale * half:.{digits}f}"
            return f"{scale * middle:+.{digits}f}{interval}{unit}"
        interval = f" [{math.exp(middle - half):.2f}, {math.exp(middle + half):.2f}]"
        return f"× {math.exp(middle):.2f}{interval}"

    def rows(self) -> Iterator[tuple[str, list[Cell]]]:
        """Yield a label and a cell for each variant."""
        yield "runs (seeds)", [Cell(str(len(runs)), "") for runs in self.variants.values()]
        for figure in FIGURES:
            cells = [self._cell(figure, variant) for variant in self.variants]
            if any(cell.mean for cell in cells):
                yield figure.label, cells

    def _cell(self, figure: Figure, variant: str) -> Cell:
        mean = self.mean(figure, variant)
        if mean is None:
            return Cell("not reached" if figure.is_to_accuracy else "", "")
        missing = self.missing(figure, variant)
        note = f" ({missing} without)" if missing else ""
        return Cell(f"{figure.write(mean)}{note}", self.versus(figure, variant))


def compare(
    paths: Sequence[Path], *, accuracy: float | None, evaluation_set: str | None
) -> RunComparison:
    """Return the comparison of run directories, or of folders that contain some. The default of
    `accuracy` is the highest one that all of them reach.

    Raises ReportError for a folder without a run, fewer than two runs, or an unknown set.
    """
    runs = [read_run(run_dir) for path in paths for run_dir in _run_dirs(path)]
    runs = sorted((run for run in runs if run.steps), key=lambda run: run.number("seed"))
    if len(runs) < 2:
        raise ReportError(f"a comparison needs at least two runs with steps, found {len(runs)}")
    names = sorted(set.intersection(*(set(run.evaluation_sets) for run in runs)))
    if evaluation_set is not None and evaluation_set not in names:
        raise ReportError(f"--set {evaluation_set}: the runs have {', '.join(names) or 'no set'}")
    name = evaluation_set or (names[0] if names else "")
    reached = min(best_accuracy(run, name) for run in runs)
    budget = Budget(
        samples=min(sum(run.trained_samples) for run in runs),
        seconds=min(run.total("time/step_s") for run in runs),
        accuracy=math.floor(100 * reached) / 100 if accuracy is None else accuracy,
        evaluation_set=name,
    )
    by_settings = _variants(runs)
    heads = _heads(by_settings)
    return RunComparison(
        variants=dict(zip(heads, by_settings.values(), strict=True)),
        budget=budget,
        differences={h: text for h, text in zip(heads, by_settings, strict=True) if h != text},
    )


def _run_dirs(path: Path) -> list[Path]:
    """Return `path` if it is a run directory, else the run directories in it."""
    if (path / "metrics.jsonl").is_file():
        return [path]
    found = sorted(each.parent for each in path.glob("**/metrics.jsonl"))
    if not found:
        raise ReportError(f"{path} is not a run directory and contains none")
    return found


def _variants(runs: Sequence[RunFiles]) -> dict[str, list[RunFiles]]:
    """Return the runs by the settings in which they differ, the synchronous ones first."""
    flat = [flat_settings(run.config) for run in runs]
    differing = differing_keys(flat)
    variants: dict[str, list[RunFiles]] = {}
    for run, settings in zip(runs, flat, strict=True):
        variants.setdefault(_name(settings, differing), []).append(run)
    return dict(
        sorted(variants.items(), key=lambda each: (not each[0].startswith(SYNCHRONOUS), each[0]))
    )


def differing_keys(flat: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the keys whose values differ."""
    keys = sorted({key for settings in flat for key in settings})
    return [key for key in keys if len({repr(each.get(key)) for each in flat}) > 1]


def _heads(variants: Mapping[str, Sequence[RunFiles]]) -> list[str]:
    """Return a short name for each variant: its settings, or the name or folder of its runs."""
    if all(len(name) <= _MAX_HEAD for name in variants):
        return [*variants]
    names = [str(runs[0].setting("name")) for runs in variants.values()]
    folders = [runs[0].run_dir.resolve() for runs in variants.values()]
    below = Path(os.path.commonpath(folders))
    paths = [folder.relative_to(below).as_posix() for folder in folders]
    return names if len({*names}) == len(names) else paths


def _name(settings: Mapping[str, object], differing: Sequence[str]) -> str:
    """Return what distinguishes a run: `synchronous`, `α = 2`, or the settings themselves."""
    shown = {key: settings.get(key) for key in differing if key not in _SCHEDULE}
    names = [_schedule(settings)] if any(key in differing for key in _SCHEDULE) else []
    return ", ".join([*names, *(f"{key}={value}" for key, value in shown.items())]) or "all runs"


def _schedule(settings: Mapping[str, object]) -> str:
    """Describe how many samples a run starts; only α = 1 without refill is synchronous."""
    factor, refill = (settings.get(key) for key in _SCHEDULE)
    alpha = f"α = {factor:g}" if isinstance(factor, float) else f"α = {factor}"
    if factor == 1:
        return f"{alpha} with refill" if refill else SYNCHRONOUS
    return alpha if refill else f"{alpha} one-shot"


def flat_settings(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return the settings by dotted key, without the ones that say where the run is."""
    found: dict[str, object] = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        if key in _PLACES:
            continue
        if isinstance(value, Mapping) and value:
            found |= flat_settings(value, f"{key}.")
        else:
            found[key] = value
    return found
